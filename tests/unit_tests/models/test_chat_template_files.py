# SPDX-License-Identifier: Apache-2.0
"""A trained chat template replaces all templates of a tokenizer and of a processor."""

import json

from transformers import AutoTokenizer

from megatron.bridge.data.media.processor_files import chat_template
from megatron.bridge.models.conversion.engine.side_files import write_chat_template
from tests.unit_tests.data.conftest import tokenizer_dir  # noqa: F401 - a fixture

TRAINED = "{% for message in messages %}<{{ message.content }}>{% endfor %}"


def test_named_templates_and_those_of_processors_are_replaced(tmp_path, tokenizer_dir):  # noqa: F811
    hf = AutoTokenizer.from_pretrained(tokenizer_dir)
    hf.chat_template = {"default": "old", "tool_use": "old, with tools"}
    hf.save_pretrained(tmp_path)
    for name in ("chat_template.json", "processor_config.json", "tokenizer_config.json"):
        path = tmp_path / name
        values = json.loads(path.read_text()) if path.is_file() else {}
        path.write_text(json.dumps({**values, "chat_template": "old"}))
    write_chat_template(tmp_path, TRAINED)
    again = AutoTokenizer.from_pretrained(tmp_path)
    question = [{"role": "user", "content": "who?"}]
    assert again.apply_chat_template(question, tokenize=False) == "<who?>"
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    assert again.apply_chat_template(question, tools=[tool], tokenize=False) == "<who?>"
    assert chat_template(str(tmp_path)) == TRAINED
    for name in ("chat_template.json", "processor_config.json", "tokenizer_config.json"):
        assert json.loads((tmp_path / name).read_text())["chat_template"] == TRAINED
