# SPDX-License-Identifier: Apache-2.0
"""Prompts for reinforcement learning: read, limited in length, in an order of each epoch."""

import json

import pytest

from megatron.bridge.data.config import DatasetRequest, PromptDatasetConfig
from megatron.bridge.data.prompts.prompts import prompt_at
from megatron.bridge.data.tokenizer import NullTokenizer
from megatron.bridge.utils.errors import UserError

TOKENIZER = NullTokenizer(96)


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def prompts(root, **settings):
    config = PromptDatasetConfig(dataset_root=root, seq_length=32, **settings)
    return config.build(DatasetRequest((8, 0, 0), TOKENIZER)).train


def test_prompts_keep_their_columns(tmp_path):
    records = [{"question": f"{number} 2", "answer": number} for number in range(4)]
    dataset = prompts(
        write(tmp_path / "file.jsonl", *records), columns={"question": "prompt"}, seed=1
    )
    drawn = [prompt_at(dataset, position) for position in range(12)]
    epochs = [
        [prompt.columns["answer"] for prompt in drawn[start : start + 4]] for start in (0, 4, 8)
    ]
    assert all(sorted(epoch) == [0, 1, 2, 3] for epoch in epochs)
    assert epochs[0] != epochs[1] or epochs[1] != epochs[2]
    assert all(prompt.tokens == [prompt.columns["answer"], 2] for prompt in drawn)
    assert drawn[0].content == f"{drawn[0].columns['answer']} 2"
    assert drawn[0].location.startswith(str(tmp_path / "file.jsonl:"))


def test_a_folder_has_a_training_file(tmp_path):
    write(tmp_path / "training.jsonl", {"prompt": "1 2 3"})
    assert prompts(str(tmp_path)).rows.prompts[0].tokens == [1, 2, 3]


def test_an_epoch_counts_completions(tmp_path):
    root = write(tmp_path / "file.jsonl", *[{"prompt": "1 2"}] * 3)
    config = PromptDatasetConfig(dataset_root=root, seq_length=32, completions_per_epoch=4)
    assert config.count_rows(TOKENIZER) == 12


def test_long_prompts_are_refused_or_dropped(tmp_path):
    root = write(tmp_path / "file.jsonl", {"prompt": "1 2 3"}, {"prompt": "1"})
    with pytest.raises(UserError, match=r"file.jsonl:1: the prompt has 3 tokens, more than 2"):
        prompts(root, max_prompt_length=2)
    dataset = prompts(root, max_prompt_length=2, truncation="drop")
    assert [prompt.tokens for prompt in dataset.rows.prompts] == [[1]]
    assert dataset.report.dropped.total() == 1
    with pytest.raises(UserError, match="no prompt that can be used"):
        prompts(
            write(tmp_path / "long.jsonl", {"prompt": "1 2 3"}),
            max_prompt_length=2,
            truncation="drop",
        )


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"text": "1"}, ["prompt=None", "keys: text", "dataset.columns"]),
        ({"prompt": ""}, ["prompt=''"]),
        ({"prompt": 3}, ["prompt=3"]),
        ({"prompt": "1", "completions": []}, ["the key completions", "dataset.columns"]),
        ({"prompt": [{"role": "user", "content": "x"}]}, ["Hugging Face"]),
    ],
)
def test_records_that_are_no_prompts(tmp_path, record, words):
    with pytest.raises(UserError) as refusal:
        prompts(write(tmp_path / "file.jsonl", record))
    assert all(word in str(refusal.value) for word in words), refusal.value


def test_settings_without_a_meaning_are_refused(tmp_path):
    root = write(tmp_path / "file.jsonl", {"prompt": "1"})
    for settings in (
        {"truncation": "left"},
        {"do_test": True},
        {"padding_free": False},
        {"prepared_dir": "p"},
    ):
        with pytest.raises(UserError, match=f"dataset.{next(iter(settings))}"):
            prompts(root, **settings)


def test_held_out_prompts_keep_their_order(tmp_path, capfd):
    write(tmp_path / "training.jsonl", *[{"prompt": str(index)} for index in range(5)])
    request = DatasetRequest((5, 4, 4), TOKENIZER, image_share=None)
    config = PromptDatasetConfig(dataset_root=str(tmp_path), seq_length=32)
    assert config.build(request).valid is None
    assert "files named training and validation" in capfd.readouterr().err
    write(tmp_path / "validation.jsonl", *[{"prompt": str(index)} for index in (7, 3)])
    splits = config.build(request)
    held_out = [prompt_at(splits.valid, index).tokens for index in range(3)]
    assert held_out == [[7], [3], [7]]
    assert splits.test is None
    single = PromptDatasetConfig(dataset_root=str(tmp_path / "training.jsonl"), seq_length=32)
    assert single.build(request).valid is None
    assert "dataset.validation_split" in capfd.readouterr().err
