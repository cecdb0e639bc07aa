# SPDX-License-Identifier: Apache-2.0
"""What differs is named in one sentence; causes are found under the errors of libraries."""

import errno

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from torch.distributed.checkpoint import CheckpointException

from megatron.bridge.checkpoint import collective, loading
from megatron.bridge.utils.errors import UserError


def _tensor(key, *shape, padded=False):
    return ShardedTensor.from_rank_offsets(key, torch.empty(shape), allow_shape_mismatch=padded)


def test_equal_content_does_not_differ():
    wanted = {"a": _tensor("a", 2, 3), "o": ShardedObject("o", None, (1,), (0,))}
    assert not loading.compare(wanted, {"a": (2, 3), "o": None}, ())


def test_every_kind_of_difference_is_named():
    wanted = {"a": _tensor("a", 2, 3), "b": _tensor("b", 4)}
    found = loading.compare(wanted, {"a": (3, 2), "c": (1,)}, ())
    assert str(found) == "it lacks b; it also holds c; shapes differ: a is 3x2, the model's is 2x3"


def test_long_lists_are_cut():
    stored = {f"layer.{index}": (1,) for index in range(9)}
    assert (
        str(loading.compare({}, stored, ())) == "it also holds layer.0, layer.1, layer.2 and 6 more"
    )


def test_known_names_and_extra_state_may_be_left_over():
    stored = {"optimizer.state.exp_avg.a": (1,), "a.self_attention._extra_state": None}
    assert not loading.compare({}, stored, ("optimizer.",))


def test_only_the_padding_of_a_vocabulary_may_differ():
    wanted = {"e": _tensor("e", 128, 8, padded=True)}
    assert not loading.compare(wanted, {"e": (64, 8)}, ())
    assert loading.compare(wanted, {"e": (64, 9)}, ()).shapes


def test_an_object_in_place_of_a_tensor_is_refused():
    assert loading.compare({"a": _tensor("a", 2)}, {"a": None}, ()).shapes == (
        "a is an object, the model's is 2",
    )


def test_a_full_disk_is_found_under_torchs_errors():
    full = OSError(errno.ENOSPC, "No space left on device")
    try:
        try:
            raise full
        except OSError:
            raise RuntimeError("PytorchStreamWriter failed writing file data/0") from None
    except RuntimeError as error:
        wrapped = CheckpointException("write", {1: (error, None)})
    assert collective.root_cause(wrapped) is full


def test_a_failure_of_the_first_rank_keeps_its_kind():
    def fail():
        raise UserError("x=1 is wrong")

    with pytest.raises(UserError, match="x=1 is wrong"):
        collective.on_first_rank(fail)
    with pytest.raises(UserError, match="x=1 is wrong"):
        collective.on_every_rank(fail)
    assert collective.on_first_rank(lambda: 3) == collective.on_every_rank(lambda: 3) == 3


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "metadata.json is missing"),
        ("not json", "metadata.json cannot be read"),
        ('{"sharded_backend": "zarr"}', "has the format 'zarr'"),
        ('{"sharded_backend": "torch_dist"}', ".metadata is missing"),
    ],
)
def test_what_is_not_a_torch_dist_checkpoint_is_refused(tmp_path, content, words):
    if content is not None:
        (tmp_path / "metadata.json").write_text(content)
    with pytest.raises(UserError, match=words):
        loading.check_files(tmp_path)
    with pytest.raises(UserError, match="does not exist"):
        loading.check_files(tmp_path / "nowhere")
