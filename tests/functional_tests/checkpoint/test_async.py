# SPDX-License-Identifier: Apache-2.0
"""Saving in the background: the same checkpoints, the same run, and what a failure there leaves."""

import os
import threading
import time
from pathlib import Path

import pytest
import torch

from megatron.bridge.checkpoint import lock, paths, verification
from megatron.bridge.checkpoint.hashing_writer import PreparedSave
from megatron.bridge.training.callbacks import Callback
from megatron.bridge.training.config import OptimizerConfig
from megatron.bridge.utils.errors import UserError
from tests.functional_tests.checkpoint.runs import DROPOUT, STEPS, run_to, tensors_of

SHARDED = {"ddp": {"use_distributed_optimizer": True}, "model": DROPOUT}
LAYOUTS = {
    "dp2_bf16": {**SHARDED, "mixed_precision": "bf16_mixed"},
    "tp2_fp16": {
        "model": {**DROPOUT, "tensor_model_parallel_size": 2},
        "mixed_precision": "fp16_mixed",
        "optimizer": OptimizerConfig(
            lr=1e-2, clip_grad=0.5, initial_loss_scale=1024, loss_scale_window=2
        ),
    },
}


def in_background(root, stop, arguments, write_files=None):
    """``run_to`` with saves in the background."""
    before = PreparedSave.write_files
    if write_files is not None:
        PreparedSave.write_files = write_files
    try:
        options = {"save_interval": 2, "async_save": True, **arguments.get("checkpoint", {})}
        return run_to(root, stop, {**arguments, "checkpoint": options})
    finally:
        PreparedSave.write_files = before


@pytest.mark.parametrize("name", ["dp2_bf16", pytest.param("tp2_fp16", marks=pytest.mark.slow)])
def test_it_is_the_same_run_bit_for_bit(two_workers, tmp_path, name):
    arguments = LAYOUTS[name]
    plain = {**arguments, "checkpoint": {"save_interval": 2}}
    undisturbed = two_workers.run(run_to, tmp_path / "plain", STEPS, plain)
    assert two_workers.run(in_background, tmp_path / "run", STEPS, arguments) == undisturbed
    for step in (2, 4, 6):
        directory = paths.iteration_dir(tmp_path / "run", step)
        verification.verify(directory)
        expected = tensors_of(paths.iteration_dir(tmp_path / "plain", step))
        found = tensors_of(directory)
        assert all(torch.equal(found[key], value) for key, value in expected.items())
    paths.write_tracker(tmp_path / "run", 4)
    assert two_workers.run(in_background, tmp_path / "run", STEPS, arguments) == undisturbed


def _slow(self):
    time.sleep(1.0)
    return WRITE(self)


def _full(self):
    if os.environ["RANK"] == "1":
        raise OSError(28, "No space left on device")
    return WRITE(self)


WRITE = PreparedSave.write_files


def _refused(root):
    """Only one checkpoint shall be kept: that is the one before until the new one is there."""
    with pytest.raises(UserError) as caught:
        in_background(root, STEPS, {"checkpoint": {"most_recent_k": 1}}, _full)
    return str(caught.value)


def test_a_failure_there_keeps_the_checkpoint_before(two_workers, tmp_path):
    two_workers.run(in_background, tmp_path, 2, {})
    messages = two_workers.run(_refused, tmp_path)
    assert all("cannot be written: No space left on device" in message for message in messages), (
        messages
    )
    assert sorted(path.name for path in Path(tmp_path).glob("iter_*")) == ["iter_0000002"]
    assert paths.latest_iteration(tmp_path) == 2
    assert lock.holder(tmp_path) is None


def _watched(root):
    published = []

    class Watch(Callback):
        def on_train_step_start(self, context):
            published.append(paths.latest_iteration(root))

    in_background(root, 4, {"extra": [Watch()], "checkpoint": {"save_interval": 2}}, _slow)
    return published


def test_it_appears_when_the_last_rank_is_done(two_workers, tmp_path):
    published = two_workers.run(_watched, tmp_path)[0]
    assert published == [None, None, None, None], (
        "the steps after the save went on before it was published"
    )
    assert paths.published_iterations(tmp_path) == [2, 4]


def _interrupted(root):
    class Fails(Callback):
        def on_train_step_start(self, context):
            if context.progress.step == 2:
                raise RuntimeError("the step fails while the save of step 2 is written")

    with pytest.raises(RuntimeError, match="the step fails"):
        in_background(root, STEPS, {"extra": [Fails()]}, _slow)
    return [thread.name for thread in threading.enumerate()]


def test_a_run_that_fails_meanwhile_gives_the_save_up(two_workers, tmp_path):
    for threads in two_workers.run(_interrupted, tmp_path):
        assert "checkpoint" not in threads
    assert paths.published_iterations(tmp_path) == []
