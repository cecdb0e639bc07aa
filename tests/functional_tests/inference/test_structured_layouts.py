# SPDX-License-Identifier: Apache-2.0
"""Structured answers on two processes: the tokens of one process, and texts that parse."""

import json
import re
from importlib.util import find_spec

import pytest
from transformers import AutoTokenizer

from megatron.bridge.inference.grammars import choice_grammar, json_grammar, regex_grammar
from megatron.bridge.inference.llm import LLM
from megatron.bridge.inference.requests import Sampling
from megatron.bridge.testing import reference
from megatron.bridge.utils.errors import UserError
from tests import scripted_server  # noqa: F401 - makes the extra importable
from tests.families.row import Row
from tests.families.rows import ROWS
from tests.unit_tests.data.conftest import tokenizer_dir  # noqa: F401 - a fixture

pytestmark = pytest.mark.skipif(
    find_spec("llguidance") is None, reason="no llguidance: run scripts/extra.sh serve"
)
SCHEMA = {
    "type": "object",
    "properties": {"days": {"enum": [1, 20, 300]}, "rain": {"type": "boolean"}},
    "required": ["days", "rain"],
    "additionalProperties": False,
}
REGEX = "[a-f]{2,4}-[0-9]"
CHOICES = ["yes", "no", "maybe"]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
TEMPLATE = (
    "{% if tools %}<tool_call>{{ tools | tojson }}</tool_call>{% endif %}"
    "{% for message in messages %}<|turn|>{{ message.content }}{% endfor %}<|turn|>"
)
CALL = {
    "messages": [{"role": "user", "content": "Rome?"}],
    "tools": [TOOL],
    "tool_choice": "required",
    "parallel_tool_calls": False,
}


@pytest.fixture(scope="module")
def expert_dir(tmp_path_factory, tokenizer_dir):  # noqa: F811
    directory = tmp_path_factory.mktemp("experts")
    hf = AutoTokenizer.from_pretrained(tokenizer_dir)
    hf.add_special_tokens({"additional_special_tokens": ["<|turn|>"]})
    hf.chat_template = TEMPLATE
    row = ROWS["qwen3_moe"]
    config = {**row.config, "vocab_size": len(hf), "max_position_embeddings": 1024}
    reference.hf_model(Row("structured", "Qwen3MoeForCausalLM", config)).save_pretrained(directory)
    hf.save_pretrained(directory)
    return directory


def answer_all(folder, layout):
    """Return the answers to structured and free requests of one batch, and a refusal."""
    grammars = (
        json_grammar(SCHEMA),
        regex_grammar(REGEX),
        choice_grammar(CHOICES),
        None,
    )
    sampled = {"max_new_tokens": 120, "temperature": 1.0, "n": 2}
    samplings = [
        Sampling(**sampled, seed=index, grammar=grammar) for index, grammar in enumerate(grammars)
    ]
    samplings[-1] = Sampling(max_new_tokens=10)
    options = {"dtype": "float32", "kv_memory": 1 << 24, "max_requests": 4}
    with LLM(str(folder), **layout, **options) as llm:
        prompts = ["Rome has", "It rains in", "The answer is", "Once upon"]
        completions = llm.generate(prompts, samplings)
        call = llm.chat(CALL, Sampling(max_new_tokens=200, temperature=1.0, seed=5))
        with pytest.raises(UserError) as error:
            llm.generate("a", Sampling(grammar="start: %json {"))
    texts = [[completion.text for completion in choices] for choices in completions]
    reasons = {completion.finish_reason for choices in completions[:3] for completion in choices}
    return texts, reasons, call.message, str(error.value)


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}, {"ep": 2}], ids=["tp2", "pp2", "ep2"])
def test_two_processes_give_the_answers_of_one(two_workers, expert_dir, layout):
    texts, reasons, message, refusal = two_workers.run(answer_all, expert_dir, layout)[0]
    assert reasons == {"stop"}
    for text in texts[0]:
        assert json.loads(text).keys() == {"days", "rain"}
    for text in texts[1]:
        assert re.fullmatch(REGEX, text)
    assert set(texts[2]) <= set(CHOICES)
    (call,) = message["tool_calls"]
    assert json.loads(call["function"]["arguments"]).keys() == {"days", "rain"}
    assert (texts, reasons, message, refusal) == answer_all(expert_dir, {})
