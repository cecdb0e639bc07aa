# SPDX-License-Identifier: Apache-2.0
"""What people get wrong in their data, each with the sentence that names it."""

import json

import pytest

from megatron.bridge.cli.main import main
from megatron.bridge.data.config import FinetuningDatasetConfig
from megatron.bridge.data.finetuning.builder import prepare_split
from megatron.bridge.data.records.encoding import (
    CONTROL,
    EMPTY,
    NO_TARGET,
    SYSTEMS,
    UNUSED,
    UNUSED_KEYS,
)
from megatron.bridge.data.tokenizer import HuggingFaceTokenizer
from tests.refusals import refused
from tests.unit_tests.data.records.chat_forms import FORMS

CHATML = next(form for form in FORMS if form.name == "chatml").template
USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}
GOOD = {"messages": [USER, ANSWER]}


def lines(*records):
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def chat(*messages):
    return lines({"messages": messages})


def prepared(folder, tokenizer, **values):
    values = {"seq_length": 64, "truncation": "right", "chat_template": CHATML} | values
    return prepare_split(
        FinetuningDatasetConfig(dataset_root=str(folder), **values), "train", tokenizer
    )


CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"function": {"name": "f", "arguments": "{x"}}],
}
IMAGE = {"role": "user", "content": [{"type": "image", "image": "x.png"}]}
BEGUN = lines(GOOD) + b'{"messages": [{"role"'
MISTAKES = {
    "a key is missing": (
        lines(GOOD, {"prompt": "x"}),
        ("jsonl:2: ", "messages", "keys are: prompt"),
    ),
    "a key has capitals": (lines({"Messages": []}), ("messages", "keys are: Messages")),
    "a file is empty": (b"", ("training.jsonl", "empty")),
    "there are blank lines only": (b"\n \n", ("training.jsonl", "empty")),
    "JSON is broken": (b'{"messages": [}\n', ("jsonl:1: ", "JSON", "column 15")),
    "the last line is cut off": (BEGUN, ("jsonl:2: ", "JSON")),
    "JSON is spread over lines": (json.dumps(GOOD, indent=1).encode(), ("JSON", "object per line")),
    "JSON is one list": (json.dumps([GOOD]).encode(), ("object", "list", "one object per line")),
    "a key is there twice": (b'{"text": "a", "text": "b"}\n', ("'text'", "twice", "keep one")),
    "bytes are Latin-1": ('{"text": "Grüße"}'.encode("latin-1"), ("jsonl:1: ", "UTF-8")),
    "bytes are UTF-16": (json.dumps(GOOD).encode("utf-16"), ("jsonl:1: ", "UTF-8")),
    "brackets without end": (b"[" * 100_000, ("jsonl:1: ", "nested too deeply")),
    "a number without end": (b'{"text": ' + b"9" * 5000 + b"}", ("jsonl:1: ", "number", "digits")),
    "half a character": (b'{"text": "\\uD83D!"}\n', ("jsonl:1: ", "\\ud83d", "repair")),
    "a role is misspelt": (
        chat(USER, ANSWER | {"role": "asistant"}),
        ("message 2: role='asistant'", "did you mean assistant?"),
    ),
    "a role is missing": (
        chat({"content": "x"}),
        ("message 1: role=None", "system, developer, user"),
    ),
    "there are no messages": (chat(), ("messages", "list", "at least one")),
    "messages are JSON text": (lines({"messages": "[]"}), ("messages", "list", "at least one")),
    "content is a number": (chat(USER, ANSWER | {"content": 3}), ("message 2: content", "int")),
    "a user says null": (
        chat(USER | {"content": None}, ANSWER),
        ("message 1: ", "content", "null"),
    ),
    "an answer is null": (
        chat(USER, ANSWER | {"content": None}),
        ("message 2: ", "content", "null"),
    ),
    "the template has no tool calls": (
        chat(USER, CALL | {"tool_calls": [{"function": {"name": "f", "arguments": {}}}]}),
        ("message 2 ", "tool_calls", "dataset.chat_template", "weight 0"),
    ),
    "the template has no thoughts": (
        chat(USER, ANSWER | {"content": "", "reasoning_content": "hm"}),
        ("message 2 ", "reasoning_content", "dataset.chat_template"),
    ),
    "content is an image": (
        chat(IMAGE, ANSWER),
        ("jsonl:1: ", "images", "vision-language", "dataset.hf_processor_path"),
    ),
    "arguments are broken": (chat(USER, CALL), ("message 2: the arguments of f", "JSON")),
    "an answer comes first": (chat(ANSWER), ("jsonl:1: ", "begins with an answer", "weight 0")),
    "there is no answer": (chat(USER), (f"1 dropped {NO_TARGET}", "training.jsonl:1)")),
    "all weights are 0": (chat(USER, ANSWER | {"weight": 0}), (f"1 dropped {NO_TARGET}",)),
    "two forms at once": (lines(GOOD | {"text": "x"}), ("messages and text", "keep one")),
    "Alpaca's form": (
        lines({"instruction": "a", "output": "b"}),
        ("instruction", "process_example_fn"),
    ),
    "two system prompts": (
        lines(
            {
                "system": "a",
                "conversations": [
                    {"from": "system", "value": "b"},
                    {"from": "human", "value": "c"},
                ],
            }
        ),
        ("key system", "system message", "keep one"),
    ),
    "an unknown speaker": (
        lines({"conversations": [{"from": "gtp", "value": "b"}]}),
        ("from='gtp'", "did you mean gpt"),
    ),
    "a completion is a number": (lines({"prompt": "a", "completion": 1}), ("completion", "int")),
    "the prompt alone is too long": (
        lines({"prompt": "a" * 900, "completion": "b"}),
        ("1 truncated", f"1 dropped {NO_TARGET}"),
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named(tmp_path, tokenizer, name):
    content, parts = MISTAKES[name]
    (tmp_path / "training.jsonl").write_bytes(content)
    with refused(str(tmp_path), *parts):
        prepared(tmp_path, tokenizer)


def test_a_pair_of_escapes_is_one_character(tmp_path, tokenizer):
    (tmp_path / "training.jsonl").write_bytes(
        b'\xef\xbb\xbf{"prompt": "a", "completion": "\\ud83d\\ude42"}\n'
    )
    (example,) = prepared(tmp_path, tokenizer).samples
    assert "\U0001f642" in tokenizer.detokenize(example.tokens.tolist())


def test_what_is_rarely_meant_is_counted(tmp_path, tokenizer):
    system, null = (
        {"role": "system", "content": "s"},
        {"role": "assistant", "content": "", "tool_calls": []},
    )
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


def test_fields_that_are_not_used_are_counted_by_name(tmp_path, tokenizer):
    tool = {"type": "function", "function": {"name": "f"}}
    records = [
        {
            "messages": [USER, ANSWER | {"reasoning_content": "hm", "id": 7}],
            "tools": [tool],
            "source": "web",
        },
        {"text": "x", "source": "web", "id": 1},
        {"prompt": "a", "completion": "b", "tools": [tool]},
    ]
    (tmp_path / "training.jsonl").write_bytes(lines(*records))
    report = prepared(tmp_path, tokenizer).report
    names = ("tools", "reasoning_content of role assistant", "id of role assistant")
    keys = ("source", "id, source", "tools")
    expected = {UNUSED.format(name) for name in names} | {UNUSED_KEYS.format(key) for key in keys}
    assert {
        note: count for note, count in report.notes.items() if note in expected
    } == dict.fromkeys(expected, 1)
    assert any(line.startswith("1 records are plain text among") for line in report.lines())


@pytest.mark.parametrize(
    "template",
    [
        CHATML.replace("{% if add_generation_prompt %}", "{% if false %}"),
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}<|im_start|>assistant\n"
        "{{ m.content }}<|im_end|>{% endgeneration %}{% else %}<|im_start|>user\n{{ m.content }}<|im_end|>"
        "{% endif %}{% endfor %}",
    ],
    ids=["no generation prompt", "inside the marks"],
)
def test_a_header_in_the_loss_is_refused(tmp_path, tokenizer, template):
    (tmp_path / "training.jsonl").write_bytes(chat(USER, ANSWER))
    with refused(
        "jsonl:1: ", "<|im_start|>assistant", "dataset.chat_template", "add_generation_prompt"
    ):
        prepared(tmp_path, tokenizer, chat_template=template)


@pytest.mark.parametrize(
    ("columns", "parts"),
    [
        ({"prompt": [1], "completion": ["a"]}, ("parquet: row 1: prompt", "int")),
        ({"text": [b"abc"]}, ("row 1: text", "bytes")),
        ({"a": [1]}, ("row 1: ", "messages", "keys are: a")),
        ({"text": []}, ("training.parquet", "empty")),
    ],
)
def test_wrong_tables_are_named(tmp_path, tokenizer, columns, parts):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "training.parquet")
    with refused(*parts):
        prepared(tmp_path, tokenizer)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("training.csv", ("no file training", ".parquet", "training.csv", "add it")),
        ("training.parquet", ("training.parquet", "parquet file")),
        ("training.arrow", ("training.arrow", "arrow file")),
    ],
)
def test_files_of_another_kind_are_named(tmp_path, tokenizer, name, parts):
    (tmp_path / name).write_bytes(b"prompt,completion\na,b\n")
    with refused(*parts):
        prepared(tmp_path, tokenizer)


def test_templates_that_are_missing_or_broken_are_named(tmp_path, tokenizer):
    (tmp_path / "training.jsonl").write_bytes(lines(GOOD))
    for template, *parts in (
        (None, "no chat template", "dataset.chat_template"),
        ("/nope.jinja", "dataset.chat_template=/nope.jinja", "No such file"),
        ("{% for m in messages %}", "jsonl:1: ", "chat template", "Unexpected end"),
    ):
        with refused(*parts):
            prepared(tmp_path, tokenizer, chat_template=template)


def test_a_tokenizer_without_an_end_is_named(tmp_path, tokenizer_dir):
    tokenizer = HuggingFaceTokenizer(str(tokenizer_dir))
    tokenizer.hf.eos_token = None
    (tmp_path / "training.jsonl").write_bytes(lines({"prompt": "a", "completion": "b"}))
    with refused(str(tokenizer_dir), "eos_token", "set one"):
        prepared(tmp_path, tokenizer)


def test_the_command_line_is_read_before_the_data(tmp_path, tokenizer_dir, capsys):
    for option, value in (("--world-size", "0"), ("--samples", "-1")):
        with pytest.raises(SystemExit):
            main(["data", "preview", "smollm2_135m_finetune_config", option, value])
        assert f"argument {option}: {value} " in capsys.readouterr().err
    (tmp_path / "training.jsonl").write_bytes(lines({"prompt": "a", "completion": "b"}))
    command = [
        *("data", "preview", "smollm2_135m_finetune_config", "--data", str(tmp_path)),
        *(
            f"tokenizer.tokenizer_model={tokenizer_dir}",
            "validation.eval_iters=0",
            "--html",
            "/nope/page.html",
        ),
    ]
    assert main(command) == 1
    told = capsys.readouterr().err
    assert "--html /nope/page.html" in told
    assert "No such file or directory" in told
