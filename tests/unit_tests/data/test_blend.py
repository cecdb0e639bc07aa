# SPDX-License-Identifier: Apache-2.0
"""Naming corpora: every form, and one sentence for every mistake."""

import json

import pytest

from megatron.bridge.data.blend import split_shares
from megatron.bridge.data.config import GPTDatasetConfig
from megatron.bridge.data.loaders import get_blend_and_blend_per_split
from megatron.bridge.utils.errors import UserError


def test_paths_with_and_without_weights():
    assert get_blend_and_blend_per_split(data_paths=["30", "a", "0.7", "b"]) == ((["a", "b"], [30.0, 0.7]), None)
    assert get_blend_and_blend_per_split(data_paths=["a", "b"]) == ((["a", "b"], None), None)
    assert get_blend_and_blend_per_split(data_paths=["a"]) == ((["a"], None), None)
    assert get_blend_and_blend_per_split() == (None, None)


def test_paths_for_each_purpose():
    blend, per_split = get_blend_and_blend_per_split(train_data_paths=["1", "a", "2", "b"], test_data_paths=["c"])
    assert blend is None
    assert per_split == ((["a", "b"], [1.0, 2.0]), None, (["c"], None))


def test_files(tmp_path):
    words = tmp_path / "words"
    words.write_text("1 a\n3 b\n")
    assert get_blend_and_blend_per_split(data_args_path=str(words)) == ((["a", "b"], [1.0, 3.0]), None)
    table = tmp_path / "table.json"
    table.write_text(json.dumps({"train": ["1", "a", "3", "b"], "valid": "c d"}))
    expected = ((["a", "b"], [1.0, 3.0]), (["c", "d"], None), None)
    assert get_blend_and_blend_per_split(per_split_data_args_path=str(table)) == (None, expected)


@pytest.mark.parametrize(
    "words", [["30", "a", "b"], ["30", "a", "70"], ["a", "30", "b", "70"], ["1", "2", "a", "b"]]
)
def test_weights_for_some_paths_only_are_refused(words):
    with pytest.raises(UserError, match="mixes weights and paths"):
        get_blend_and_blend_per_split(data_paths=words)


def test_two_ways_at_once_are_refused():
    with pytest.raises(UserError, match="data_paths and train_data_paths"):
        get_blend_and_blend_per_split(data_paths=["a"], valid_data_paths=["b"])


def test_bad_files(tmp_path):
    with pytest.raises(UserError, match=r"data_args_path=.* cannot be read: No such file"):
        get_blend_and_blend_per_split(data_args_path=str(tmp_path / "none"))
    table = tmp_path / "table.json"
    table.write_text('{"train": ["a"],\n "vaild": ["b"]}')
    with pytest.raises(UserError, match="'vaild' is none of train, valid, test; did you mean valid"):
        get_blend_and_blend_per_split(per_split_data_args_path=str(table))
    table.write_text("{")
    with pytest.raises(UserError, match="is not JSON: line 1"):
        get_blend_and_blend_per_split(per_split_data_args_path=str(table))


def test_split_shares():
    assert split_shares("969,30,1") == (0.969, 0.03, 0.001)
    assert split_shares("1") == (1.0, 0.0, 0.0)
    for wrong in ("", "a,b", "1,2,3,4", "-1,2", "0,0,0", "nan", "1;2"):
        with pytest.raises(UserError, match=r"dataset\.split="):
            split_shares(wrong)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "dataset.blend is not set"),
        ({"blend": (["a"], None)}, "dataset.split=None"),
        ({"blend": (["a", "b"], [1.0]), "split": "1"}, "2 paths and 1 weights"),
        ({"blend": (["a", "b"], [1.0, 0.0]), "split": "1"}, "all must be positive"),
        ({"blend": ([], None), "split": "1"}, "names no corpus"),
        ({"blend": ("a", "b"), "split": "1"}, "give a pair such as"),
        (
            {"blend_per_split": ((["a"], None), None, None), "split": "1"},
            "has no effect with dataset.blend_per_split",
        ),
        ({"blend_per_split": ((["a"], None),)}, "has 1 entries"),
        ({"blend_per_split": ((["a"], None), None, None), "blend": (["a"], None)}, "both set"),
        ({"blend": (["a"], None), "split": "1", "data_sharding": True}, "data_sharding=True has no effect"),
        ({"blend": (["a"], None), "split": "1", "dataloader_type": "random"}, "choose single, batch or cyclic"),
    ],
)
def test_wrong_configs_are_named(values, message):
    with pytest.raises(UserError, match=message):
        GPTDatasetConfig(seq_length=8, **values).finalize()


def test_all_problems_are_reported_together():
    with pytest.raises(UserError) as caught:
        GPTDatasetConfig(seq_length=0, blend=(["a", "b"], [1.0]), split="x").finalize()
    for part in ("dataset.seq_length=0", "2 paths and 1 weights", "dataset.split='x'"):
        assert part in str(caught.value)
