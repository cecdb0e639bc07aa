# SPDX-License-Identifier: Apache-2.0
"""Ranks that start together: the first prepares, all read the same, and its error is everyone's."""

import json
from pathlib import Path

import pytest

from megatron.bridge.data.config import DatasetRequest, FinetuningDatasetConfig
from megatron.bridge.data.tokenizer import NullTokenizer
from megatron.bridge.utils.errors import UserError
from tests.refusals import says


def tokens_of(folder, prepared):
    """All tokens of the training data as this rank reads them, or what it is told."""
    config = FinetuningDatasetConfig(seq_length=16, dataset_root=folder, prepared_dir=prepared)
    try:
        train = config.build(DatasetRequest((6, 0, 0), NullTokenizer(50))).train
    except UserError as error:
        return str(error)
    return [train[place]["tokens"].tolist() for place in range(6)]


@pytest.fixture
def folder(tmp_path):
    lines = [json.dumps({"prompt": f"{n} {n} ", "completion": "7 8"}) + "\n" for n in range(6)]
    (tmp_path / "training.jsonl").write_text("".join(lines))
    return tmp_path


def test_all_ranks_read_what_the_first_prepared(two_workers, folder):
    first, second = two_workers.run(tokens_of, str(folder), str(folder / "prepared"))
    assert first == second == tokens_of(str(folder), None)
    assert len(list(Path(folder / "prepared").iterdir())) == 1


def test_an_error_of_the_first_is_everyones(two_workers, folder):
    with (folder / "training.jsonl").open("a") as file:
        file.write('{"prompt": 3, "completion": "4"}\n')
    first, second = two_workers.run(tokens_of, str(folder), str(folder / "prepared"))
    assert first == second
    assert says(first, "training.jsonl:7: ", "prompt", "int")
