# SPDX-License-Identifier: Apache-2.0
"""What a run says when its folder, its disk or its checkpoint is not as it should be, and what it leaves."""

import errno
import os
from pathlib import Path

import pytest
import torch

from megatron.bridge.checkpoint import layout
from megatron.bridge.training.config import OptimizerConfig
from megatron.bridge.utils.errors import UserError
from tests.functional_tests.checkpoint.runs import STEPS, run_to

EVERY_TWO = {"checkpoint": {"save_interval": 2}}


def refused(root, arguments, **options):
    """The sentence with which a run on this rank ends."""
    with pytest.raises(UserError) as caught:
        run_to(root, STEPS, arguments, **options)
    return str(caught.value)


def _one_sentence(messages):
    assert messages[0] == messages[1]
    assert "\n" not in messages[0]
    return messages[0]


def _saved(two_workers, tmp_path, arguments=EVERY_TWO, stop=4):
    two_workers.run(run_to, tmp_path / "run", stop, arguments)
    return tmp_path / "run"


def test_a_damaged_shard_is_named_with_the_way_back(two_workers, tmp_path):
    root = _saved(two_workers, tmp_path)
    shard = max((root / "iter_0000004").glob("*.distcp"), key=lambda path: path.stat().st_size)
    os.truncate(shard, 100)
    message = _one_sentence(two_workers.run(refused, root, EVERY_TWO))
    assert f"{root / 'iter_0000004'} is damaged: {shard.name} has 100 of" in message
    assert f"to go back, write 2 into {root / layout.TRACKER}" in message
    (root / layout.TRACKER).write_text("2")
    losses = two_workers.run(run_to, root, STEPS, EVERY_TWO)[0]["losses"]
    assert list(losses) == [1, 2, 3, 4, 5, 6]


def test_a_tracker_that_names_nothing(two_workers, tmp_path):
    root = _saved(two_workers, tmp_path)
    (root / layout.TRACKER).write_text("9")
    message = _one_sentence(two_workers.run(refused, root, EVERY_TWO))
    assert "names iteration 9" in message
    assert "iter_0000002, iter_0000004" in message


def test_what_is_asked_for_but_was_not_saved(two_workers, tmp_path):
    lean = {"checkpoint": {"save_optim": False, "save_rng": False}}
    root = _saved(two_workers, tmp_path, lean, stop=2)
    message = _one_sentence(two_workers.run(refused, root, {}))
    assert "was saved without the optimizer's state; set checkpoint.load_optim=false" in message
    bare = {"checkpoint": {"load_optim": False, "load_rng": False}}
    assert list(two_workers.run(run_to, root, STEPS, bare)[0]["losses"]) == [1, 2, 3, 4, 5, 6]


def test_another_model_or_schedule(two_workers, tmp_path):
    root = _saved(two_workers, tmp_path)
    message = _one_sentence(two_workers.run(refused, root, {"model": {"ffn_hidden_size": 48}}))
    assert "shapes differ: decoder.layers.0.mlp.linear_fc1.weight is 128x32, the model's is 96x32" in message
    message = _one_sentence(two_workers.run(refused, root, {"optimizer": OptimizerConfig(lr=5e-3)}))
    assert "optimizer.lr gives 0.005, the checkpoint has 0.01" in message
    assert "scheduler.override_opt_param_scheduler" in message


def test_weights_alone_are_no_run(two_workers, tmp_path):
    root = _saved(two_workers, tmp_path)
    fresh = two_workers.run(run_to, tmp_path / "fresh", 1, {}, str(root))[0]
    trained = two_workers.run(run_to, tmp_path / "straight", 1, {})[0]
    assert fresh["losses"][1] < trained["losses"][1] - 0.05  # step 1 from trained weights, not from fresh ones
    assert fresh["progress"]["step"] == 1


def test_a_folder_to_load_that_is_not_there(two_workers, tmp_path):
    message = _one_sentence(two_workers.run(_refused_load, tmp_path / "run", str(tmp_path / "typo")))
    assert f"checkpoint {tmp_path / 'typo'} does not exist" in message
    assert not list((tmp_path).glob("run/iter_*"))


def _refused_load(root, load):
    return refused(root, {}, load=load)


def test_a_folder_that_cannot_be_written_is_found_before_training(two_workers, tmp_path):
    (tmp_path / "file").touch()
    message = _one_sentence(two_workers.run(refused, tmp_path / "file" / "run", {}))
    assert str(tmp_path / "file" / "run") in message
    assert "Not a directory" in message


def test_a_full_disk_keeps_the_checkpoint_before(two_workers, tmp_path):
    root = tmp_path / "run"
    for broken in ("__1_0.distcp", ".metadata.tmp", "run_config.yaml"):
        message = _one_sentence(two_workers.run(_refused_on_a_full_disk, root, broken))
        assert f"{root / 'iter_0000004'} cannot be written: No space left on device; free some space" in message
        assert sorted(path.name for path in root.glob("iter_*")) == ["iter_0000002"]
        assert layout.latest_iteration(root) == 2
    assert list(two_workers.run(run_to, root, STEPS, EVERY_TWO)[0]["losses"]) == [1, 2, 3, 4, 5, 6]


def _refused_on_a_full_disk(root, broken):
    """Step 4 cannot be saved, because one file of the checkpoint cannot be written to its end."""
    opened = Path.open

    def on_a_full_disk(self, mode="r", *args, **kwargs):
        if self.name == broken and self.parent.name == "iter_0000004.incomplete":
            return Path("/dev/full").open(mode, *args, **kwargs)
        return opened(self, mode, *args, **kwargs)

    Path.open = on_a_full_disk
    try:
        return refused(root, EVERY_TWO)
    finally:
        Path.open = opened


def test_errno_of_a_full_device():
    with pytest.raises(OSError, match="No space") as caught, Path("/dev/full").open("wb") as stream:
        torch.save(torch.ones(1000), stream)
    assert caught.value.errno == errno.ENOSPC
