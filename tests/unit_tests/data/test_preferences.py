# SPDX-License-Identifier: Apache-2.0
"""Pairs of answers: formats, masks, and what people get wrong."""

import json
from itertools import pairwise

import numpy as np
import pytest

from megatron.bridge.data.config import PreferenceDatasetConfig
from megatron.bridge.data.finetuning.builder import prepare_split
from megatron.bridge.data.preference.pairs import (
    ANSWERS,
    EQUAL,
    INCOMPLETE,
    LabeledRows,
    LabeledSamples,
    PairRows,
)
from megatron.bridge.data.records.encoding import TOO_LONG
from tests.refusals import refused
from tests.unit_tests.data.records.chat_forms import FORMS

CHATML = next(form for form in FORMS if form.name == "chatml").template
USER = {"role": "user", "content": "hi"}
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("Peace!", "Go away."))
TEXTS = {"prompt": "hi ", "chosen": "Peace!", "rejected": "Go away."}
LISTS = {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}
WHOLE = {"chosen": [USER, GOOD], "rejected": [USER, BAD]}


def prepared(folder, tokenizer, *records, **values):
    (folder / "training.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    config = PreferenceDatasetConfig(
        dataset_root=str(folder), seq_length=128, chat_template=CHATML, **values
    )
    config.finalize()
    return prepare_split(config, "train", tokenizer)


def trained(tokenizer, sample):
    return tokenizer.detokenize(sample.tokens[sample.trained].tolist())


@pytest.mark.parametrize(
    "record", [TEXTS, LISTS, WHOLE], ids=["texts", "lists", "whole conversations"]
)
def test_a_record_is_two_samples_that_differ_in_what_is_trained(tmp_path, tokenizer, record):
    chosen, rejected = prepared(tmp_path, tokenizer, record).samples
    assert trained(tokenizer, chosen).startswith("Peace!")
    assert trained(tokenizer, rejected).startswith("Go away.")
    first = int(np.argmax(chosen.trained))
    assert chosen.tokens[:first].tolist() == rejected.tokens[:first].tolist()


def test_messages_and_whole_conversations_are_the_same(tmp_path, tokenizer):
    lists, whole = (prepared(tmp_path, tokenizer, record).samples for record in (LISTS, WHOLE))
    assert [sample.tokens.tolist() for sample in lists] == [
        sample.tokens.tolist() for sample in whole
    ]


def test_a_row_is_a_pair(tmp_path, tokenizer):
    samples = prepared(tmp_path, tokenizer, LISTS, TEXTS).samples
    rows = PairRows(samples, tokenizer.eod, multiple=4)
    assert len(rows) == 2
    lengths = np.diff(rows[1]["cu_seqlens"])
    assert (lengths % 4 == 0).all()
    assert len(lengths) == 2
    start = int(lengths[0])
    assert rows[1]["tokens"][start : start + 3].tolist() == samples[3].tokens[:3].tolist()


def test_a_pair_is_kept_or_dropped_as_a_whole(tmp_path, tokenizer):
    long = TEXTS | {"rejected": "x" * 300}
    report = prepared(
        tmp_path, tokenizer, TEXTS, long, TEXTS | {"rejected": "Peace!"}, truncation="drop"
    ).report
    assert report.dropped == {TOO_LONG: 1, INCOMPLETE: 1, EQUAL: 1}
    assert (report.records, report.samples) == (3, 2)


@pytest.mark.parametrize(
    ("record", "parts"),
    [
        (
            {"prompt": "a", "chosen": "b"},
            ("jsonl:1: ", "rejected is missing", "keys: chosen, prompt"),
        ),
        (
            {"chosen": "a", "rejected": "b"},
            ("jsonl:1: ", "chosen without a prompt", "a list", "str"),
        ),
        ({"chosen": [GOOD], "rejected": [BAD]}, ("jsonl:1: ", "same message", "prompt")),
        (TEXTS | {"rejected": 3}, ("jsonl:1: ", "int")),
        (
            TEXTS | {"rejected": "x" * 300},
            ("jsonl:1: rejected", "dataset.seq_length", "dataset.truncation"),
        ),
    ],
)
def test_mistakes_name_the_record(tmp_path, tokenizer, record, parts):
    with refused(*parts):
        prepared(tmp_path, tokenizer, record)


def test_rows_have_no_padding(tmp_path):
    with refused("dataset.padding_free=False"):
        PreferenceDatasetConfig(
            dataset_root=str(tmp_path), seq_length=8, padding_free=False
        ).finalize()
    with refused("dataset.train_on=everything"):
        PreferenceDatasetConfig(
            dataset_root=str(tmp_path), seq_length=8, train_on="everything"
        ).finalize()


LABELED = [
    {"prompt": "hi ", "completion": "Peace!", "label": True},
    {"prompt": "hi ", "completion": "Go away.", "label": False},
    {"prompt": [{"role": "user", "content": "Bye"}], "completion": [GOOD], "label": False},
]


def labeled_rows(folder, tokenizer, records=LABELED, longest=64, **values):
    samples = prepared(folder, tokenizer, *records, labeled=True, **values).samples
    return LabeledRows(samples, tokenizer.eod, longest, 4)


def sequences(tokenizer, row):
    """The texts of the inputs and of the targets in the loss of each sequence of a row."""
    for start, stop in pairwise(row["cu_seqlens"].tolist()):
        mask = row["loss_mask"][start:stop].bool()
        yield [
            tokenizer.detokenize(row[key][start:stop][mask].tolist())
            for key in ("tokens", "labels")
        ]


def test_a_row_of_kto_is_an_answer_and_its_prompt_with_the_answer_to_another_prompt(
    tmp_path, tokenizer
):
    rows = labeled_rows(tmp_path, tokenizer)
    found = [[trained for _, trained in sequences(tokenizer, row)] for row in rows]
    assert [[text[:5] for text in texts] for texts in found] == [
        [
            "Peace",
            "Peace",
        ],  # the second one is that of the third record, not the second one of the same prompt
        ["Go aw", "Peace"],
        ["Peace", "Peace"],
    ]
    assert found[0][1] == found[2][0]
    assert [set(row["desirable"].tolist()) for row in rows] == [{1.0}, {0.0}, {0.0}]
    own, other = np.split(rows[0]["tokens"].numpy(), [int(rows[0]["cu_seqlens"][1])])
    prompt = len(tokenizer.tokenize("hi "))
    assert own[:prompt].tolist() == other[:prompt].tolist()


def test_labels_are_neither_shown_nor_counted(tmp_path, tokenizer):
    pairs = prepared(tmp_path, tokenizer, TEXTS)
    answers = [
        {"prompt": "hi ", "completion": TEXTS[name], "label": name == "chosen"} for name in ANSWERS
    ]
    found = prepared(tmp_path, tokenizer, *answers, labeled=True)
    assert (found.report.tokens, found.report.trained) == (
        pairs.report.tokens,
        pairs.report.trained,
    )
    shown = LabeledSamples(found.samples)
    assert [each.tokens.tolist() for each in shown] == [
        each.tokens.tolist() for each in pairs.samples
    ]
    assert shown.lengths.tolist() == pairs.samples.lengths.tolist()


def test_answers_to_other_prompts_are_cut(tmp_path, tokenizer):
    rows = labeled_rows(
        tmp_path, tokenizer, [LABELED[0], {**LABELED[1], "prompt": "x" * 20}], longest=24
    )
    assert np.diff(rows[1]["cu_seqlens"]).tolist()[1] == 24  # 23 inputs, padded to a multiple of 4


@pytest.mark.parametrize(
    ("records", "parts"),
    [
        (
            [{"prompt": "a", "completion": "b"}],
            ("jsonl:1: ", "label is missing", "dpo.loss_type=kto", "keys: "),
        ),
        ([LABELED[0] | {"label": "good"}], ("jsonl:1: ", "label='good'", "true", "false")),
        ([TEXTS], ("jsonl:1: ", "completion and label", "keys: chosen, prompt, rejected")),
        (LABELED[:2], ("dpo.loss_type=kto", "2 records", "other prompts")),
    ],
)
def test_mistakes_in_labeled_records_are_named(tmp_path, tokenizer, records, parts):
    with refused(*parts):
        labeled_rows(tmp_path, tokenizer, records)
