# SPDX-License-Identifier: Apache-2.0
"""What a request cost and when it runs: reasoning tokens, tokens of reused caches, and priorities."""

import pytest
from transformers import AutoTokenizer

from megatron.bridge.inference.engine import Engine
from megatron.bridge.inference.llm import LLM
from megatron.bridge.inference.requests import Sampling
from megatron.bridge.inference.server.engine_loop import EngineLoop, Submit
from tests.scripted_server import HAS_SERVER, LocalEngine, scripted_server
from tests.unit_tests.data.conftest import tokenizer_dir  # noqa: F401 - a fixture
from tests.unit_tests.inference.test_chat_requests import CALL, TEMPLATE, USER, WEATHER
from tests.unit_tests.inference.test_llm import model_dir  # noqa: F401 - a fixture

pytestmark = pytest.mark.skipif(not HAS_SERVER, reason="no server: run scripts/extra.sh serve")

THOUGHT = "Well, it may rain."


@pytest.fixture(params=[False, True], ids=["texts", "special tokens"])
def hf(tokenizer_dir, request):  # noqa: F811
    """Marks of reasoning as texts of several tokens, and as special tokens."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    marks = ["<think>", "</think>"] if request.param else []
    special = ["<|turn|>", "<|end|>", *marks]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def tokens_between(hf, text, begin, end):
    """The number of tokens that begin between two positions of a text, by decoding every prefix."""
    ids = hf.encode(text, add_special_tokens=False)
    starts = [len(hf.decode(ids[:count], skip_special_tokens=False)) for count in range(len(ids))]
    return sum(begin <= start < end for start in starts)


@pytest.mark.parametrize(
    "text",
    [
        f"<think>\n{THOUGHT}\n</think>\n\nTake one.",
        f"<think>{THOUGHT}</think>{CALL}",
        f"<think>{THOUGHT}",
        "Take one.",
    ],
)
def test_reasoning_tokens_are_those_between_the_marks(hf, text):
    begin = len("<think>") if "<think>" in text else len(text)
    end = text.find("</think>") if "</think>" in text else len(text)
    expected = tokens_between(hf, text, begin, end)
    assert (expected > 0) == ("<think>" in text)
    options = {"model": "toy", "messages": [USER], "tools": [WEATHER]}
    with scripted_server(hf, [text] * 4) as (client, _):
        usage = client.chat.completions.create(**options).usage
        two = client.chat.completions.create(**options, extra_body={"max_tokens": 500})
        stream = client.chat.completions.create(
            **options, stream=True, stream_options={"include_usage": True}
        )
        assert [piece.usage for piece in stream][-1] == usage
        tool = {"type": "function", **WEATHER["function"]}
        response = client.responses.create(model="toy", input="Rome?", tools=[tool])
    assert usage.completion_tokens_details.reasoning_tokens == expected
    assert two.usage == usage
    assert response.usage.output_tokens_details.reasoning_tokens == expected
    assert usage.completion_tokens == len(hf.encode(text, add_special_tokens=False))


def test_all_choices_are_counted(hf):
    texts = [f"<think>{THOUGHT}</think>Yes.", "No."]
    with scripted_server(hf, texts) as (client, _):
        usage = client.chat.completions.create(model="toy", messages=[USER], n=2).usage
    end = texts[0].find("</think>")
    expected = tokens_between(hf, texts[0], len("<think>"), end)
    assert usage.completion_tokens_details.reasoning_tokens == expected


def test_reasoning_tokens_of_channels(hf):
    begin, end = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant"
    text = f"{begin}{THOUGHT}{end}<|channel|>final<|message|>Yes."
    with scripted_server(hf, [text], tool_parser="harmony") as (client, _):
        answer = client.chat.completions.create(model="toy", messages=[USER])
    assert answer.choices[0].message.content == "Yes."
    expected = tokens_between(hf, text, len(begin), text.find(end))
    assert answer.usage.completion_tokens_details.reasoning_tokens == expected > 0


def test_reused_caches_are_counted(model_dir):  # noqa: F811
    prompt = list(range(10, 50))
    options = {"dtype": "float32", "kv_memory": 1 << 24, "chunk": 8, "graphs": False}
    ask = {"model": "toy", "prompt": [prompt, prompt[:20]], "max_tokens": 2, "n": 2}
    with (
        LLM(str(model_dir), **options) as llm,
        scripted_server(llm.hf, [], context=128, engine=LocalEngine(llm.engine)) as (client, _),
    ):
        first = client.completions.create(**ask).usage
        again = client.completions.create(**ask).usage
        stream = client.completions.create(
            **ask, stream=True, stream_options={"include_usage": True}
        )
        streamed = [piece.usage for piece in stream][-1]
        response = client.responses.create(model="toy", input="Rome? " * 9, max_output_tokens=1)
        other = client.responses.create(model="toy", input="Rome? " * 9, max_output_tokens=1)
    # the prompts are submitted one after the other; of each, complete chunks without the last token
    assert first.prompt_tokens_details.cached_tokens == 16
    assert again.prompt_tokens_details.cached_tokens == 32 + 16
    assert streamed == again
    assert response.usage.input_tokens_details.cached_tokens == 0
    expected = (other.usage.input_tokens - 1) // 8 * 8
    assert other.usage.input_tokens_details.cached_tokens == expected > 0


def test_the_lowest_priority_runs_first(model_dir):  # noqa: F811
    options = {"dtype": "float32", "kv_memory": 1 << 24, "max_requests": 1}
    with LLM(str(model_dir), **options) as llm:
        assert isinstance(llm.engine, Engine)
        loop = EngineLoop(llm.engine)
        priorities = [0, 5, 0, -1, 5]
        submits = [
            Submit(index, [10 + index], Sampling(max_new_tokens=3, priority=priority))
            for index, priority in enumerate(priorities)
        ]
        list(loop.apply(submits[:1]))
        list(loop.step())  # the first text runs
        list(loop.apply(submits[1:]))
        ended = []
        while loop.is_busy:
            ended += [event.id for event in loop.step() if event.finish_reason is not None]
    assert ended == [0, 3, 2, 1, 4]


def test_priorities_reach_the_engine(hf):
    with scripted_server(hf, ["a", "b", "c"]) as (client, engine):
        more = {"extra_body": {"priority": -2}}
        client.chat.completions.create(model="toy", messages=[USER], **more)
        client.completions.create(model="toy", prompt="a", **more)
        client.responses.create(model="toy", input="a", **more)
    assert [sampling.priority for _, sampling in engine.submitted] == [-2, -2, -2]
