# SPDX-License-Identifier: Apache-2.0
"""Samples that are prepared in a folder, with what killed processes leave there."""

from pathlib import Path

import numpy as np

from megatron.bridge.data.config import FinetuningDatasetConfig
from megatron.bridge.data.finetuning.builder import prepare_split
from megatron.bridge.data.records import preparation
from megatron.bridge.data.tokenizer import HuggingFaceTokenizer
from megatron.bridge.utils.atomic import published_file

SAVED = Path("tests/fixtures/v0.1").resolve()
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ' ' + m['content'] + '<eos> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"
)


def prepared(folder):
    config = FinetuningDatasetConfig(
        dataset_root=str(SAVED / "chats"),
        seq_length=64,
        prepared_dir=str(folder),
        chat_template=TEMPLATE,
    )
    return prepare_split(config, "train", HuggingFaceTokenizer(str(SAVED / "base"))).samples


def test_what_a_killed_process_left_is_not_taken_for_a_part(tmp_path, monkeypatch):
    whole = prepared(tmp_path / "whole")
    monkeypatch.setattr(preparation, "PART_RECORDS", 3)
    [made] = (tmp_path / "whole").iterdir()
    parts = tmp_path / "cut" / f"{made.name}.parts"
    parts.mkdir(parents=True)
    writing = published_file(parts / "000001.npz")
    aside = writing.__enter__()
    np.savez(
        aside,
        tokens=whole.tokens,
        trained=whole.trained,
        bounds=whole.bounds,
        report=np.array("{}"),
    )
    resumed = prepared(tmp_path / "cut")
    assert np.array_equal(resumed.tokens, whole.tokens)
    assert np.array_equal(resumed.bounds, whole.bounds)
    writing.gen.close()
