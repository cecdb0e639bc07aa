# SPDX-License-Identifier: Apache-2.0
"""Texts with a class and pairs of texts: what is an input, what is the target, and what people get wrong."""

import json

import pytest

from megatron.bridge.data.config import (
    ClassificationDatasetConfig,
    EmbeddingDatasetConfig,
    RewardDatasetConfig,
    TokenClassificationDatasetConfig,
)
from megatron.bridge.data.finetuning.builder import prepare_split
from megatron.bridge.data.labels.label_encoding import WordLabelRows
from megatron.bridge.data.preference.pairs import PairRows
from tests.refusals import refused
from tests.unit_tests.data.records.chat_forms import FORMS

CHATML = next(form for form in FORMS if form.name == "chatml").template
MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Peace!"}]


def prepared(folder, tokenizer, kind, *records, **values):
    (folder / "training.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    config = kind(
        **{"dataset_root": str(folder), "seq_length": 128, "chat_template": CHATML, **values}
    )
    config.finalize()
    return prepare_split(config, "train", tokenizer)


def classes(folder, tokenizer, *records, **values):
    return prepared(
        folder, tokenizer, ClassificationDatasetConfig, *records, **{"num_labels": 3, **values}
    )


def test_the_class_stands_behind_all_tokens_of_the_text(tmp_path, tokenizer):
    records = [
        {"text": "good day", "label": 2},
        {"prompt": "good ", "completion": "day", "label": "b"},
    ]
    found = classes(
        tmp_path,
        tokenizer,
        *records,
        {"messages": MESSAGES, "label": 0},
        label_names=["a", "b", "c"],
    )
    assert [int(sample.tokens[-1]) for sample in found.samples] == [2, 1, 0]
    for sample in found.samples:
        assert sample.trained.tolist() == [False] * (len(sample.tokens) - 1) + [True]
    plain, _, chat = (sample.tokens[:-1].tolist() for sample in found.samples)
    assert plain == tokenizer.hf.encode("good day")
    assert chat == tokenizer.hf.encode(
        tokenizer.hf.apply_chat_template(MESSAGES, chat_template=CHATML, tokenize=False),
        add_special_tokens=False,
    )


def test_labels_go_with_their_records_where_some_are_dropped(tmp_path, tokenizer):
    records = [{"text": "a " * 90, "label": 1}, {"text": "b", "label": 2}]
    found = classes(tmp_path, tokenizer, *records, seq_length=16, truncation="drop")
    assert [int(sample.tokens[-1]) for sample in found.samples] == [2]


@pytest.mark.parametrize("truncation", ["right", "left"])
def test_a_text_is_cut_and_keeps_its_class(tmp_path, tokenizer, truncation):
    whole = classes(
        tmp_path, tokenizer, {"text": "good day to you all, my friends", "label": 2}
    ).samples[0]
    cut = classes(
        tmp_path,
        tokenizer,
        {"text": "good day to you all, my friends", "label": 2},
        seq_length=4,
        truncation=truncation,
    ).samples[0]
    assert len(cut.tokens) == 5
    assert cut.tokens[-1] == 2
    if truncation == "right":
        assert cut.tokens[:4].tolist() == whole.tokens[:4].tolist()
    else:
        assert cut.tokens[2:4].tolist() == whole.tokens[-3:-1].tolist()


def test_a_text_of_seq_length_tokens_is_not_too_long(tmp_path, tokenizer):
    length = len(tokenizer.hf.encode("good day"))
    found = classes(tmp_path, tokenizer, {"text": "good day", "label": 0}, seq_length=length)
    assert len(found.samples[0].tokens) == length + 1


REFUSED = {
    "missing": ({"text": "x"}, ["label=None", "from 0 to 2", "model.num_labels"]),
    "too large": ({"text": "x", "label": 3}, ["label=3", "from 0 to 2"]),
    "negative": ({"text": "x", "label": -1}, ["label=-1"]),
    "a truth value": ({"text": "x", "label": True}, ["label=True"]),
    "unknown": ({"text": "x", "label": "d"}, ["label='d'", "one of a, b, c"]),
    "too long": (
        {"text": "a b " * 90, "label": 1},
        ["dataset.seq_length=128", "dataset.truncation"],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_records_that_are_refused(case, tmp_path, tokenizer):
    record, words = REFUSED[case]
    names = ["a", "b", "c"] if case == "unknown" else None
    with refused(*words):
        classes(tmp_path, tokenizer, record, label_names=names)


def test_rewards_are_of_the_last_token_of_each_answer(tmp_path, tokenizer):
    record = {"prompt": "hi ", "chosen": "Peace!", "rejected": "Go away."}
    samples = prepared(tmp_path, tokenizer, RewardDatasetConfig, record).samples
    row = PairRows(samples, tokenizer.eod, multiple=4)[0]
    starts = row["cu_seqlens"].tolist()
    for sample, start in zip(samples, starts, strict=False):
        last = start + len(sample.tokens) - 2
        assert row["loss_mask"][last] == 1
        assert row["tokens"][last] == sample.tokens[-2]
    assert row["loss_mask"].sum() == 2
    assert samples[0].tokens[:-1].tolist() == [
        *tokenizer.hf.encode("hi "),
        *tokenizer.hf.encode("Peace!", add_special_tokens=False),
    ]


def test_queries_and_texts_are_whole(tmp_path, tokenizer):
    record = {"query": "good day", "positive": MESSAGES}
    query, positive = prepared(tmp_path, tokenizer, EmbeddingDatasetConfig, record).samples
    assert query.tokens[:-1].tolist() == tokenizer.hf.encode("good day")
    assert "Peace!" in tokenizer.detokenize(positive.tokens[:-1].tolist())
    wrong = {"query": "good day", "positive": 3}
    with refused("positive=3", "list of messages"):
        prepared(tmp_path, tokenizer, EmbeddingDatasetConfig, wrong)


WORDS = [
    {"tokens": ["Peace", "unbelievably", "hi"], "ner_tags": ["O", "B", 1]},
    {"tokens": ["to", "friends"], "ner_tags": [0, 1]},
]


def word_labels(folder, tokenizer, *records, **values):
    values = {"label_names": ["O", "B"], **values}
    return prepared(folder, tokenizer, TokenClassificationDatasetConfig, *records, **values)


@pytest.mark.parametrize("label_all_tokens", [False, True])
def test_tokens_have_the_classes_that_transformers_collator_takes(
    tmp_path, tokenizer, label_all_tokens
):
    found = word_labels(tmp_path, tokenizer, *WORDS, label_all_tokens=label_all_tokens)
    rows = WordLabelRows(found.samples, tokenizer.eod)
    features = []
    for record, numbers in zip(
        WORDS, ([0, 1, 1], [0, 1]), strict=True
    ):  # as transformers' run_ner.py does
        encoded = tokenizer.hf(record["tokens"], is_split_into_words=True)
        labels, last = [], None
        for word in encoded.word_ids():
            counts = word is not None and (word != last or label_all_tokens)
            labels.append(numbers[word] if counts else -100)
            last = word
        features.append({"input_ids": encoded["input_ids"], "labels": labels})
    assert any(feature["labels"].count(-100) > 1 for feature in features) or label_all_tokens
    assert len(rows) == len(features)
    for row, feature in zip(rows, features, strict=True):
        assert row["tokens"].tolist() == feature["input_ids"]
        assert row["labels"].where(row["loss_mask"] > 0, -100).tolist() == feature["labels"]
    assert found.report.tokens == sum(len(feature["input_ids"]) + 1 for feature in features)


def test_words_that_are_refused_dropped_or_cut(tmp_path, tokenizer):
    with refused("jsonl:1: ", "tokens and ner_tags", "dataset.text_column"):
        word_labels(tmp_path, tokenizer, {"tokens": ["a"], "ner_tags": [0, 1]})
    with refused("jsonl:1: ", "label='X'", "dataset.label_names"):
        word_labels(tmp_path, tokenizer, {"tokens": ["a"], "ner_tags": ["X"]})
    with refused("jsonl:1: ", "dataset.seq_length=2", "dataset.truncation"):
        word_labels(tmp_path, tokenizer, WORDS[0], seq_length=2)
    with refused("dataset.truncation=left"):
        word_labels(tmp_path, tokenizer, WORDS[0], truncation="left")
    long = {"words": ["a"] * 90, "classes": [1] * 90}
    columns = {"text_column": "words", "label_column": "classes", "seq_length": 16}
    cut = word_labels(tmp_path, tokenizer, long, truncation="right", **columns)
    assert (len(WordLabelRows(cut.samples, 0)[0]["tokens"]), cut.report.cut) == (16, 1)
