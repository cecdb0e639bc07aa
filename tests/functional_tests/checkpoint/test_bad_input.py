# SPDX-License-Identifier: Apache-2.0
"""What a run says when its folder, its disk or its checkpoint is not as it should be, and what it leaves."""

import errno
import os
import shutil
import socket
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch

from megatron.bridge.checkpoint import lock, paths, verification
from megatron.bridge.training.config import OptimizerConfig
from megatron.bridge.utils.console import console
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


@pytest.fixture(scope="module")
def first_part(two_workers, tmp_path_factory):
    """A run that stopped at step 4."""
    folder = tmp_path_factory.mktemp("first part") / "run"
    two_workers.run(run_to, folder, 4, EVERY_TWO)
    return folder


@pytest.fixture
def root(first_part, tmp_path):
    """The same run in a folder of the test's own."""
    return Path(shutil.copytree(first_part, tmp_path / "run"))


REFUSE = {"checkpoint": {"save_interval": 2, "when_damaged": "refuse"}}


def test_a_damaged_shard_is_named_and_the_checkpoint_before_is_used(two_workers, root, tmp_path):
    undisturbed = two_workers.run(run_to, tmp_path / "undisturbed", STEPS, EVERY_TWO)
    shard = max((root / "iter_0000004").glob("*.distcp"), key=lambda path: path.stat().st_size)
    flip_bit(shard, shard.stat().st_size // 2)
    message = _one_sentence(two_workers.run(refused, root, REFUSE))
    assert (
        f"{root / 'iter_0000004'} is damaged: the content of {shard.name} is not what was written"
        in message
    )
    assert "to resume from iter_0000002, set checkpoint.when_damaged=use_previous" in message
    resumed = two_workers.run(spoken, root)
    assert f"the content of {shard.name} is not what was written" in resumed[0][1]
    assert f"resuming from {root / 'iter_0000002'}" in resumed[0][1]
    assert [result for result, _ in resumed] == undisturbed
    verification.verify(root / "iter_0000004")  # replaced on the way


def spoken(root):
    """The result of a run, and what this rank printed."""
    with console().capture() as capture:
        result = run_to(root, STEPS, EVERY_TWO)
    return result, capture.get()


def flip_bit(path, position):
    with path.open("r+b") as stream:
        stream.seek(position)
        byte = stream.read(1)[0]
        stream.seek(position)
        stream.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("damage", ["9", "", None], ids=["names nothing", "empty", "missing"])
def test_a_damaged_tracker(two_workers, root, damage):
    if damage is None:
        (root / paths.TRACKER).unlink()
    else:
        (root / paths.TRACKER).write_text(damage)
    message = _one_sentence(two_workers.run(refused, root, REFUSE))
    assert paths.TRACKER in message
    assert "iter_0000004" in message
    result, said = two_workers.run(spoken, root)[0]
    assert paths.TRACKER in said
    assert f"resumed from {root / 'iter_0000004'} at step 4" in said
    assert list(result["losses"]) == [1, 2, 3, 4, 5, 6]


def test_when_nothing_is_whole_the_run_is_refused(two_workers, root):
    for name in ("iter_0000002", "iter_0000004"):
        (root / name / "__1_0.distcp").unlink()
    message = _one_sentence(two_workers.run(refused, root, EVERY_TWO))
    assert f"{root / 'iter_0000002'} is damaged: __1_0.distcp is missing" in message


def test_a_stale_tracker_is_named(two_workers, root):
    (root / paths.TRACKER).write_text("2")
    _, said = two_workers.run(spoken, root)[0]
    assert f"{root / paths.TRACKER} names iteration 2" in said
    assert "iter_0000004 will be replaced" in said


def test_a_second_run_in_one_folder_is_refused(two_workers, root):
    (root / "iter_0000006.1a2b3c4d.incomplete").mkdir()  # what the first one is about to write
    lock.acquire(root)
    try:
        message = _one_sentence(two_workers.run(refused, root, EVERY_TWO))
    finally:
        lock.release(root)
    assert f"{root} is being written by process {os.getpid()} on" in message
    assert (root / "iter_0000006.1a2b3c4d.incomplete").exists()


def test_what_is_asked_for_but_was_not_saved(two_workers, tmp_path):
    lean = {"checkpoint": {"save_optim": False, "save_rng": False}}
    root = tmp_path / "run"
    two_workers.run(run_to, root, 2, lean)
    message = _one_sentence(two_workers.run(refused, root, {}))
    assert "iter_0000002" in message
    assert "checkpoint.load_optim=false" in message
    bare = {"checkpoint": {"load_optim": False, "load_rng": False}}
    assert list(two_workers.run(run_to, root, STEPS, bare)[0]["losses"]) == [1, 2, 3, 4, 5, 6]


def test_another_model_or_schedule(two_workers, root):
    message = _one_sentence(two_workers.run(refused, root, {"model": {"ffn_hidden_size": 48}}))
    assert "model.ffn_hidden_size is 48, in the checkpoint 64" in message
    allowed = {"allow_model_change": ["ffn_hidden_size"]}
    message = _one_sentence(
        two_workers.run(refused, root, {"model": {"ffn_hidden_size": 48}, "checkpoint": allowed})
    )
    assert (
        "shapes differ: decoder.layers.0.mlp.linear_fc1.weight is 128x32, the model's is 96x32"
        in message
    )
    message = _one_sentence(two_workers.run(refused, root, {"optimizer": OptimizerConfig(lr=5e-3)}))
    assert "optimizer.lr is 0.005, in the checkpoint 0.01" in message
    assert "scheduler.override_opt_param_scheduler" in message


def test_weights_alone_are_no_run(two_workers, root, tmp_path):
    fresh = two_workers.run(run_to, tmp_path / "fresh", 1, {}, str(root))[0]
    trained = two_workers.run(run_to, tmp_path / "straight", 1, {})[0]
    assert (
        fresh["losses"][1] < trained["losses"][1] - 0.05
    )  # step 1 from trained weights, not from fresh ones
    assert fresh["progress"]["step"] == 1


def test_a_folder_to_load_that_is_not_there(two_workers, tmp_path):
    message = _one_sentence(
        two_workers.run(_refused_load, tmp_path / "run", str(tmp_path / "typo"))
    )
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
    for broken, nodes in (("__1_0.distcp", 2), (".metadata.tmp", 1), ("run_config.yaml", 1)):
        message = _one_sentence(two_workers.run(refused_on_a_full_disk, root, broken, nodes))
        node = f" on node {socket.gethostname()}" * (nodes - 1)
        assert (
            f"{root / 'iter_0000004'} cannot be written: No space left on device{node}; free some space"
            in message
        )
        assert sorted(path.name for path in root.glob("iter_*")) == ["iter_0000002"]
        assert paths.latest_iteration(root) == 2
    assert list(two_workers.run(run_to, root, STEPS, EVERY_TWO)[0]["losses"]) == [1, 2, 3, 4, 5, 6]


def refused_on_a_full_disk(root, broken, nodes=1):
    """Step 4 cannot be saved, because files of the checkpoint, by a pattern, cannot be written to their end."""
    opened = Path.open

    def on_a_full_disk(self, mode="r", *args, **kwargs):
        if fnmatchcase(self.name, broken) and self.parent.name.startswith("iter_0000004."):
            return Path("/dev/full").open(mode, *args, **kwargs)
        return opened(self, mode, *args, **kwargs)

    Path.open = on_a_full_disk
    os.environ["LOCAL_WORLD_SIZE"] = str(2 // nodes)
    try:
        return refused(root, EVERY_TWO)
    finally:
        del os.environ["LOCAL_WORLD_SIZE"]
        Path.open = opened


def test_errno_of_a_full_device():
    with pytest.raises(OSError, match="No space") as caught, Path("/dev/full").open("wb") as stream:
        torch.save(torch.ones(1000), stream)
    assert caught.value.errno == errno.ENOSPC
