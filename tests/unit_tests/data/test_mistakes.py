# SPDX-License-Identifier: Apache-2.0
"""What people get wrong in their data, each with the sentence that names it."""

import json

import pytest

from megatron.bridge.cli.main import main
from megatron.bridge.data.config import FinetuningDatasetConfig
from megatron.bridge.data.encoding import CONTROL, EMPTY, SYSTEMS
from megatron.bridge.data.finetuning import prepare_split
from megatron.bridge.data.tokenizer import HuggingFaceTokenizer
from megatron.bridge.utils.errors import UserError
from tests.unit_tests.data.chat_forms import FORMS

CHATML = next(form for form in FORMS if form.name == "chatml").template
USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}
GOOD = {"messages": [USER, ANSWER]}


def lines(*records):
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def chat(*messages):
    return lines({"messages": messages})


def prepared(folder, tokenizer, **values):
    values = {"seq_length": 64, "truncation": "right", "chat_template": CHATML} | values
    return prepare_split(FinetuningDatasetConfig(dataset_root=str(folder), **values), "train", tokenizer)


CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{x"}}]}
IMAGE = {"role": "user", "content": [{"type": "image", "image": "x.png"}]}
BEGUN = lines(GOOD) + b'{"messages": [{"role"'
MISTAKES = {
    "a key is missing": (lines(GOOD, {"prompt": "x"}), r"jsonl:2: expected messages, .*; the keys are: prompt$"),
    "a key has capitals": (lines({"Messages": []}), r"the keys are: Messages$"),
    "a file is empty": (b"", r"leaves no example to learn from \(it is empty\)"),
    "there are blank lines only": (b"\n \n", r"leaves no example to learn from \(it is empty\)"),
    "JSON is broken": (b'{"messages": [}\n', r"jsonl:1: this line is not JSON: .* at column 15"),
    "the last line is cut off": (BEGUN, r"jsonl:2: this line is not JSON"),
    "JSON is spread over lines": (json.dumps(GOOD, indent=1).encode(), r"not JSON: .*\(one whole object a line\)"),
    "JSON is one list": (json.dumps([GOOD]).encode(), r"must be a JSON object, not list: write one object a line"),
    "a key is there twice": (b'{"text": "a", "text": "b"}\n', r"the key 'text' is there twice in one object"),
    "bytes are Latin-1": ('{"text": "Grüße"}'.encode("latin-1"), r"jsonl:1: this line is not UTF-8"),
    "bytes are UTF-16": (json.dumps(GOOD).encode("utf-16"), r"jsonl:1: this line is not UTF-8"),
    "brackets without end": (b"[" * 100_000, r"jsonl:1: this line cannot be read: it is nested too deeply"),
    "a number without end": (
        b'{"text": ' + b"9" * 5000 + b"}",
        r"cannot be read: a number has thousands of",
    ),
    "half a character": (b'{"text": "\\uD83D!"}\n', r"\\ud83d is one half of a pair and no character"),
    "a role is misspelt": (
        chat(USER, ANSWER | {"role": "asistant"}),
        r"message 2: role='asistant' is none of .*did",
    ),
    "a role is missing": (chat({"content": "x"}), r"message 1: role=None is none of system, developer, user"),
    "there are no messages": (chat(), r"messages must be a list with at least one message"),
    "messages are JSON text": (lines({"messages": "[]"}), r"messages must be a list with at least one message"),
    "content is a number": (chat(USER, ANSWER | {"content": 3}), r"message 2: content must be a text, not int"),
    "content is an image": (
        chat(IMAGE, ANSWER),
        r"a content part of type image is no text: use a vision-language",
    ),
    "arguments are broken": (chat(USER, CALL), r"message 2: the arguments of f are not JSON"),
    "an answer comes first": (chat(ANSWER), r"jsonl:1: the conversation begins with an answer"),
    "there is no answer": (chat(USER), r"1 dropped without a token to learn"),
    "all weights are 0": (chat(USER, ANSWER | {"weight": 0}), r"1 dropped without a token to learn"),
    "two forms at once": (lines(GOOD | {"text": "x"}), r"has messages and also text: keep one"),
    "Alpaca's form": (
        lines({"instruction": "a", "output": "b"}),
        r"join instruction and input to a prompt with a",
    ),
    "two system prompts": (
        lines(
            {"system": "a", "conversations": [{"from": "system", "value": "b"}, {"from": "human", "value": "c"}]}
        ),
        r"has a key system and also a system message: keep one",
    ),
    "an unknown speaker": (
        lines({"conversations": [{"from": "gtp", "value": "b"}]}),
        r"from='gtp' .*did you mean gpt",
    ),
    "a completion is a number": (lines({"prompt": "a", "completion": 1}), r"completion must be a text, not int"),
    "the prompt alone is too long": (
        lines({"prompt": "a" * 900, "completion": "b"}),
        r"1 cut, 1 dropped without a",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named(tmp_path, tokenizer, name):
    content, message = MISTAKES[name]
    (tmp_path / "training.jsonl").write_bytes(content)
    with pytest.raises(UserError, match=message) as refusal:
        prepared(tmp_path, tokenizer)
    assert str(tmp_path) in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_pair_of_escapes_is_one_character(tmp_path, tokenizer):
    (tmp_path / "training.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "a", "completion": "\\ud83d\\ude42"}\n')
    (example,) = prepared(tmp_path, tokenizer).examples
    assert "\U0001f642" in tokenizer.detokenize(example.tokens.tolist())


def test_what_is_rarely_meant_is_counted(tmp_path, tokenizer):
    system, null = {"role": "system", "content": "s"}, {"role": "assistant", "content": None}
    injected = {"role": "user", "content": "x</s>y"}
    records = [
        {"messages": [system, system, USER, ANSWER]},
        {"messages": [USER, null, USER, ANSWER]},
        {"prompt": "a", "completion": ""},
        {"messages": [injected, ANSWER]},
    ]
    (tmp_path / "training.jsonl").write_bytes(lines(*records))
    notes = prepared(tmp_path, tokenizer).report.notes
    assert (notes[SYSTEMS], notes[EMPTY], notes[CONTROL]) == (1, 2, 1)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"prompt": [1], "completion": ["a"]}, r"parquet: row 1: prompt must be a text, not int"),
        ({"text": [b"abc"]}, r"row 1: text must be a text, not bytes"),
        ({"a": [1]}, r"row 1: expected messages, .*the keys are: a"),
        ({"text": []}, r"leaves no example to learn from \(it is empty\)"),
    ],
)
def test_wrong_tables_are_named(tmp_path, tokenizer, columns, message):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "training.parquet")
    with pytest.raises(UserError, match=message):
        prepared(tmp_path, tokenizer)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("training.csv", r"has no file training with one of the endings .*\(there is training.csv\): add it"),
        ("training.parquet", r"training.parquet is no parquet file"),
        ("training.arrow", r"training.arrow is no arrow file"),
    ],
)
def test_files_of_another_kind_are_named(tmp_path, tokenizer, name, message):
    (tmp_path / name).write_bytes(b"prompt,completion\na,b\n")
    with pytest.raises(UserError, match=message):
        prepared(tmp_path, tokenizer)


def test_templates_that_are_missing_or_broken_are_named(tmp_path, tokenizer):
    (tmp_path / "training.jsonl").write_bytes(lines(GOOD))
    for template, message in (
        (None, "has no chat template: give one with dataset.chat_template"),
        ("/nope.jinja", "dataset.chat_template=/nope.jinja cannot be read: No such file"),
        ("{% for m in messages %}", r"jsonl:1: the chat template refuses the conversation: Unexpected end"),
    ):
        with pytest.raises(UserError, match=message):
            prepared(tmp_path, tokenizer, chat_template=template)


def test_a_tokenizer_without_an_end_is_named(tmp_path, tokenizer_dir):
    tokenizer = HuggingFaceTokenizer(str(tokenizer_dir))
    tokenizer.hf.eos_token = None
    (tmp_path / "training.jsonl").write_bytes(lines({"prompt": "a", "completion": "b"}))
    with pytest.raises(UserError, match="defines no eos_token: set one"):
        prepared(tmp_path, tokenizer)


def test_the_command_line_is_read_before_the_data(tmp_path, tokenizer_dir, capsys):
    for option, value, message in (
        ("--world-size", "0", "argument --world-size: 0 is no number from 1"),
        ("--samples", "-1", "argument --samples: -1 is no number from 1"),
    ):
        with pytest.raises(SystemExit):
            main(["data", "preview", "smollm2_135m_finetune_config", option, value])
        assert message in capsys.readouterr().err
    (tmp_path / "training.jsonl").write_bytes(lines({"prompt": "a", "completion": "b"}))
    command = [
        *("data", "preview", "smollm2_135m_finetune_config", "--data", str(tmp_path)),
        *(f"tokenizer.tokenizer_model={tokenizer_dir}", "validation.eval_iters=0", "--html", "/nope/page.html"),
    ]
    assert main(command) == 1
    assert "--html=/nope/page.html cannot be written: No such file or directory" in capsys.readouterr().err
