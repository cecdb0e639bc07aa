# SPDX-License-Identifier: Apache-2.0
"""Naming corpora: every form, and one sentence for every mistake."""

import json

import pytest

from megatron.bridge.data.config import GPTDatasetConfig
from megatron.bridge.data.loaders import get_blend_and_blend_per_split
from megatron.bridge.data.pretraining.blend import split_problems
from tests.refusals import refused, says


def test_paths_with_and_without_weights():
    assert get_blend_and_blend_per_split(data_paths=["30", "a", "0.7", "b"]) == (
        (["a", "b"], [30.0, 0.7]),
        None,
    )
    assert get_blend_and_blend_per_split(data_paths=["a", "b"]) == ((["a", "b"], None), None)
    assert get_blend_and_blend_per_split(data_paths=["a"]) == ((["a"], None), None)
    assert get_blend_and_blend_per_split() == (None, None)


def test_paths_for_each_purpose():
    blend, per_split = get_blend_and_blend_per_split(
        train_data_paths=["1", "a", "2", "b"], test_data_paths=["c"]
    )
    assert blend is None
    assert per_split == ((["a", "b"], [1.0, 2.0]), None, (["c"], None))


def test_files(tmp_path):
    words = tmp_path / "words"
    words.write_text("1 a\n3 b\n")
    assert get_blend_and_blend_per_split(data_args_path=str(words)) == (
        (["a", "b"], [1.0, 3.0]),
        None,
    )
    table = tmp_path / "table.json"
    table.write_text(json.dumps({"train": ["1", "a", "3", "b"], "valid": "c d"}))
    expected = ((["a", "b"], [1.0, 3.0]), (["c", "d"], None), None)
    assert get_blend_and_blend_per_split(per_split_data_args_path=str(table)) == (None, expected)


@pytest.mark.parametrize(
    "words", [["30", "a", "b"], ["30", "a", "70"], ["a", "30", "b", "70"], ["1", "2", "a", "b"]]
)
def test_weights_for_some_paths_only_are_refused(words):
    with refused(" ".join(words), "weight", "path"):
        get_blend_and_blend_per_split(data_paths=words)


def test_two_ways_at_once_are_refused():
    with refused("data_paths", "train_data_paths"):
        get_blend_and_blend_per_split(data_paths=["a"], valid_data_paths=["b"])


def test_bad_files(tmp_path):
    with refused("data_args_path=", "none", "No such file"):
        get_blend_and_blend_per_split(data_args_path=str(tmp_path / "none"))
    table = tmp_path / "table.json"
    table.write_text('{"train": ["a"],\n "vaild": ["b"]}')
    with refused(str(table), "'vaild'", "did you mean valid?"):
        get_blend_and_blend_per_split(per_split_data_args_path=str(table))
    table.write_text("{")
    with refused(str(table), "JSON", "line 1"):
        get_blend_and_blend_per_split(per_split_data_args_path=str(table))


def test_split_is_up_to_three_shares():
    for right in ("969,30,1", "1", "0,0.5", "8,1,1"):
        assert split_problems(right) == []
    for wrong in ("", "a,b", "1,2,3,4", "-1,2", "0,0,0", "nan", "1;2", "inf,1", None):
        (problem,) = split_problems(wrong)
        assert says(problem, f"dataset.split={wrong!r}", "969,30,1")


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({}, ("dataset.blend", "MockGPTDatasetConfig")),
        ({"blend": (["a"], None)}, ("dataset.split=None", "969,30,1")),
        ({"blend": (["a", "b"], [1.0]), "split": "1"}, ("dataset.blend", "2 paths", "1 weights")),
        (
            {"blend": (["a", "b"], [1.0, 0.0]), "split": "1"},
            ("dataset.blend", "[1.0, 0.0]", "positive"),
        ),
        ({"blend": ([], None), "split": "1"}, ("dataset.blend", "corpus")),
        ({"blend": ("a", "b"), "split": "1"}, ("dataset.blend=('a', 'b')", "pair")),
        (
            {"blend_per_split": ((["a"], None), None, None), "split": "1"},
            ("dataset.split='1'", "dataset.blend_per_split", "remove"),
        ),
        ({"blend_per_split": ((["a"], None),)}, ("dataset.blend_per_split", "1 entries", "three")),
        (
            {"blend_per_split": ((["a"], None), None, None), "blend": (["a"], None)},
            ("dataset.blend", "dataset.blend_per_split", "remove one"),
        ),
        (
            {"blend": (["a"], None), "split": "1", "data_sharding": True},
            ("dataset.data_sharding=True", "dataset.dataloader_type=cyclic"),
        ),
        (
            {"blend": (["a"], None), "split": "1", "dataloader_type": "random"},
            ("dataset.dataloader_type='random'", "single, batch or cyclic"),
        ),
    ],
)
def test_wrong_configs_are_named(values, parts):
    with refused(*parts):
        GPTDatasetConfig(seq_length=8, **values).finalize()


def test_all_problems_are_reported_together():
    with refused("dataset.seq_length=0", "2 paths", "1 weights", "dataset.split='x'"):
        GPTDatasetConfig(seq_length=0, blend=(["a", "b"], [1.0]), split="x").finalize()
