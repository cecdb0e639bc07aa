# SPDX-License-Identifier: Apache-2.0
"""Loss masks against a rule written token by token; nothing is cut or dropped without being counted."""

import json

import pytest
import torch

from megatron.bridge.data.config import DatasetRequest, FinetuningDatasetConfig
from megatron.bridge.data.finetuning.builder import prepare_split
from megatron.bridge.data.records.encoding import NO_TARGET, TOO_LONG
from megatron.bridge.utils.console import console
from megatron.bridge.utils.errors import UserError
from tests.refusals import refused

SEQ = 32
PAIRS = [
    ("What is mercy? ", "It droppeth as rain."),
    ("Be or not? ", "Be."),
    ("", "Once more!"),
    ("Peace: ", "café"),
]


def write(directory, name, records):
    lines = [json.dumps(record) for record in records]
    (directory / f"{name}.jsonl").write_text("\n\n".join(lines) + "\n")
    return directory / f"{name}.jsonl"


def config(directory, **values):
    return FinetuningDatasetConfig(seq_length=SEQ, dataset_root=str(directory), **values)


def build(directory, tokenizer, sizes, **values):
    return config(directory, **values).build(DatasetRequest(sizes, tokenizer))


@pytest.mark.parametrize("keys", [("prompt", "completion"), ("input", "output")])
def test_only_the_completion_and_its_end_are_learnt(tmp_path, tokenizer, keys):
    write(tmp_path, "validation", [dict(zip(keys, pair, strict=True)) for pair in PAIRS])
    dataset = build(tmp_path, tokenizer, (0, len(PAIRS), 0)).valid
    hf = tokenizer.hf
    for sample, (prompt, completion) in zip(dataset, PAIRS, strict=False):
        prompt_ids = hf(prompt)["input_ids"]
        answer = [*hf(completion, add_special_tokens=False)["input_ids"], hf.eos_token_id]
        learnt = [
            label
            for label, use in zip(sample["labels"].tolist(), sample["loss_mask"], strict=True)
            if use
        ]
        text = [*prompt_ids, *answer]
        padding = [hf.eos_token_id] * (SEQ + 1 - len(text))
        assert learnt == answer
        assert [*sample["tokens"].tolist(), sample["labels"][-1].item()] == text + padding
        assert torch.equal(sample["tokens"][1:], sample["labels"][:-1])
        assert torch.equal(sample["position_ids"], torch.arange(SEQ))


def test_of_plain_text_all_but_the_first_token_is_learnt(tmp_path, tokenizer):
    write(tmp_path, "test", [{"text": "To be, or not to be"}])
    sample = build(tmp_path, tokenizer, (0, 0, 3)).test[2]
    ids = [*tokenizer.tokenize("To be, or not to be"), tokenizer.eod]
    assert sample["loss_mask"].tolist() == [1.0] * (len(ids) - 1) + [0.0] * (SEQ + 1 - len(ids))


def test_every_epoch_has_every_example_once_in_another_order(tmp_path, tokenizer):
    write(
        tmp_path, "training", [{"prompt": str(number), "completion": "yes"} for number in range(20)]
    )
    train = build(tmp_path, tokenizer, (60, 0, 0)).train
    epochs = [
        [tuple(train[i]["tokens"].tolist()) for i in range(20 * e, 20 * e + 20)] for e in range(3)
    ]
    assert len({tuple(sorted(epoch)) for epoch in epochs}) == 1
    assert len({tuple(epoch) for epoch in epochs}) == 3
    again = build(
        tmp_path, tokenizer, (1000, 0, 0)
    ).train  # a longer run goes through the same order
    assert [tuple(again[i]["tokens"].tolist()) for i in range(20, 40)] == epochs[1]
    other = build(tmp_path, tokenizer, (60, 0, 0), seed=1).train
    assert [tuple(other[i]["tokens"].tolist()) for i in range(20)] != epochs[0]


def all_in(text, *parts):
    return all(part in text for part in parts)


def long_records():
    """One that fits, one cut in its answer, one cut before it, one without an answer."""
    return [
        {"prompt": "a", "completion": "b"},
        {"prompt": "a", "completion": "b " * 50},
        {"prompt": "a " * 50, "completion": "b"},
    ]


def test_long_samples_are_refused_by_default(tmp_path, tokenizer):
    write(tmp_path, "training", long_records())
    with refused("training.jsonl:3: ", "dataset.seq_length=32", "dataset.truncation"):
        prepare_split(config(tmp_path), "train", tokenizer)


def test_long_samples_are_cut_or_dropped_and_counted(tmp_path, tokenizer):
    write(tmp_path, "training", long_records())
    dropped = prepare_split(config(tmp_path, truncation="drop"), "train", tokenizer)
    assert len(dropped.samples) == 1
    assert all_in("; ".join(dropped.report.lines()), "1 samples", f"2 dropped {TOO_LONG}")
    cut = prepare_split(config(tmp_path, truncation="right"), "train", tokenizer)
    assert [len(sample.tokens) for sample in cut.samples] == [4, SEQ + 1]
    assert all_in(
        "; ".join(cut.report.lines()), "2 samples", "2 truncated", f"1 dropped {NO_TARGET}"
    )


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("", ("training.jsonl", "empty")),
        ('{"prompt": "a", "completion": "b"}\n{"prompt": "a"', ("training.jsonl:2: ", "JSON")),
        ("[1]", ("training.jsonl:1: ", "object", "list")),
        ('{"prompt": "a", "answer": "b"}', ("expected messages, ", "answer, prompt")),
        ('{"prompt": "a", "completion": 3}', ("completion", "int")),
        ('{"messages": []}', ("messages", "list", "at least one")),
    ],
)
def test_wrong_files_are_named(tmp_path, tokenizer, content, parts):
    (tmp_path / "training.jsonl").write_text(content)
    with refused(*parts):
        build(tmp_path, tokenizer, (4, 0, 0))


def test_all_mistakes_of_all_splits_are_named_together(tmp_path, tokenizer):
    """Each is at its line, and those of one kind share a sentence."""
    good = {"prompt": "a", "completion": "b"}
    lines = [json.dumps(good) for _ in range(60)]
    lines[4] = '{"prompt": "a"'
    lines[9] = '{"prompt": "a", "completion": 3}'
    for number in (20, 30, 40, 50, 55):
        lines[number] = json.dumps({"prompt": "a", "answer": f"b{number}"})
    (tmp_path / "training.jsonl").write_text("\n".join(lines))
    write(tmp_path, "validation", [good, {"messages": []}])
    sentences = (
        "training.jsonl:5: the line is not valid JSON",
        "training.jsonl:10: ",
        "training.jsonl:21: ",
        "the same at 31, 41, 51 and 1 more",
        "validation.jsonl:3: ",
    )
    for options in ({}, {"workers": 2}, {"prepared_dir": str(tmp_path / "prepared")}):
        with pytest.raises(UserError) as caught:
            build(tmp_path, tokenizer, (4, 0, 0), **options)
        message = str(caught.value)
        assert [part for part in sentences if part not in message] == []
        assert len(message.splitlines()) == 4


def test_a_file_that_is_fine_names_no_others(tmp_path, tokenizer):
    write(tmp_path, "training", [{"prompt": "a" * 99, "completion": "b"}, {"text": "c"}])
    with refused("training.jsonl:1", "dataset.seq_length", "truncation"):
        build(tmp_path, tokenizer, (4, 0, 0), truncation="refuse")


def test_splits_without_a_file_are_left_out(tmp_path, tokenizer):
    write(tmp_path, "training", [{"prompt": "a", "completion": "b"}])
    with console().capture() as capture:
        splits = build(tmp_path, tokenizer, (4, 4, 4))
    assert splits.train is not None
    assert splits.valid is splits.test is None
    said = capture.get()
    assert "no valid split" in said
    assert "no test split" in said


def test_a_missing_file_and_wrong_options_are_named(tmp_path, tokenizer):
    write(tmp_path, "valid", [{"text": "under another name"}])
    with refused(str(tmp_path), "validation", ".jsonl", "dataset.do_validation=false"):
        build(tmp_path, tokenizer, (0, 4, 0))
    with refused("dataset.truncation='middle'", "keep_answer"):
        build(tmp_path, tokenizer, (4, 0, 0), truncation="middle")
