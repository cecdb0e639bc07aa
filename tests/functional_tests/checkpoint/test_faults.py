# SPDX-License-Identifier: Apache-2.0
"""What a run does about signals, time limits, wrong numbers, slow and hanging ranks."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.bridge.checkpoint import lock, paths
from megatron.bridge.checkpoint.model_io import unwrap
from megatron.bridge.training.callbacks import Callback
from megatron.bridge.training.callbacks.guard.hang_detection import HANG_EXIT_CODE
from megatron.bridge.training.callbacks.guard.preemption import REQUEUE_EXIT_CODE
from megatron.bridge.training.callbacks.guard.skipped_batches import steps_to_skip
from megatron.bridge.training.config import (
    DistributedInitConfig,
    OptimizerConfig,
    RerunStateMachineConfig,
    StragglerDetectionConfig,
)
from megatron.bridge.utils.console import console
from megatron.bridge.utils.processes import free_port
from tests.functional_tests.checkpoint.runs import DROPOUT, STEPS, run_to
from tests.functional_tests.checkpoint.test_resume import EXPERTS


class At(Callback):
    """Does something on one rank at one step."""

    def __init__(self, event, step, rank, action):
        setattr(self, f"on_{event}", lambda context: self._act(context, step, rank, action))

    def _act(self, context, step, rank, action):
        if context.progress.step == step and os.environ["RANK"] == str(rank):
            action(context)


def _left(root, options, *callbacks):
    """How a run ends that leaves early: exit code or error, and what this rank printed."""
    with console().capture() as capture:
        try:
            run_to(root, STEPS, {"model": DROPOUT, "extra": list(callbacks), **options})
            ended = 0
        except SystemExit as exit_:
            ended = exit_.code
        except FloatingPointError as error:
            ended = str(error)
    return ended, capture.get()


def _signalled(root):
    one = At("grads_ready", 2, 1, lambda context: os.kill(os.getpid(), signal.SIGTERM))
    return _left(root, {}, one)


def _out_of_time(root):
    return _left(root, {"train": {"exit_duration_in_mins": 1e-6}})


@pytest.mark.parametrize(("leave", "step"), [(_signalled, 3), (_out_of_time, 1)])
def test_a_run_that_must_leave_saves_and_asks_to_be_started_again(
    two_workers, tmp_path, leave, step
):
    undisturbed = two_workers.run(run_to, None, STEPS, {"model": DROPOUT})
    ends = two_workers.run(leave, tmp_path)
    assert [ended for ended, _ in ends] == [REQUEUE_EXIT_CODE] * 2, (
        "a signal to one rank is for all"
    )
    assert "exit code 75" in ends[0][1]
    assert paths.latest_iteration(tmp_path) == step
    assert lock.holder(tmp_path) is None
    assert two_workers.run(run_to, tmp_path, STEPS, {"model": DROPOUT}) == undisturbed


RERUN = {"rerun_state_machine": RerunStateMachineConfig()}
WITH_TOKEN_0 = {
    "global_batch_size": 8
}  # in half of it nobody looks at the broken row of the embedding in step 3


def _nan_once(root):
    def spoil(context):
        next(iter(context.model[0].parameters())).main_grad.view(-1)[0] = float("nan")

    with console().capture() as capture:
        options = {"model": DROPOUT, "extra": [At("grads_ready", 3, 1, spoil)], **RERUN}
        result = run_to(root, STEPS, options)
    return result, capture.get()


def test_a_transient_error_changes_nothing(two_workers):
    undisturbed = two_workers.run(run_to, None, STEPS, {"model": DROPOUT})
    disturbed = two_workers.run(_nan_once, None)
    assert "step 4: the gradient norm is nan on rank 1" in disturbed[0][1]
    assert "a transient error" in disturbed[0][1]
    for (result, _), expected in zip(disturbed, undisturbed, strict=True):
        # the callback that counts the drawn tokens saw them once: they were kept for the second try
        assert result == expected


def _overflown():
    """The scales by which gradients were divided in the end; one of an expert was infinite in step 2."""

    def spoil(context):
        named = unwrap(context.model[0]).named_parameters()
        next(one for name, one in named if ".experts." in name).main_grad.view(-1)[0] = float("inf")

    def look(context):
        scales.extend(part.get_loss_scale().item() for part in context.optimizer.chained_optimizers)

    scales, last = [], Callback()
    last.on_train_end = look
    optimizer = OptimizerConfig(lr=1e-2, initial_loss_scale=1024, hysteresis=1)
    half = {"mixed_precision": "fp16_mixed", "optimizer": optimizer}
    model = {**EXPERTS, "expert_model_parallel_size": 2}
    progress = run_to(
        None, 3, {"model": model, "extra": [At("grads_ready", 1, 1, spoil), last], **half}
    )["progress"]
    return scales, progress["skipped_steps"]


def test_an_overflow_of_experts_lowers_the_loss_scale_for_all(two_workers):
    """With a scale of their own, their gradients would be twice as large from then on."""
    assert two_workers.run(_overflown) == [([512.0, 512.0], 1)] * 2


def _poisoned(root, options):
    """Step 3's batch is broken, whoever looks at it."""

    def on_train_step_start(context):
        bias = next(iter(context.model[0].parameters()))
        if context.progress.step == 2:
            context.user_state["kept"] = bias.data.view(-1)[0].item()
            bias.data.view(-1)[0] = float("nan")

    def on_error(context, error):
        parameter = next(iter(context.model[0].parameters()))
        parameter.data.view(-1)[0] = context.user_state["kept"]

    poison = Callback()
    poison.on_train_step_start, poison.on_error = on_train_step_start, on_error
    return _left(root, options, poison)


def _persistent(root, policy):
    options = {"rerun_state_machine": RerunStateMachineConfig(when_persistent=policy)}
    return _poisoned(root, {**options, "train": WITH_TOKEN_0, "checkpoint": {"save_interval": 1}})


def test_a_persistent_error_ends_the_run_before_the_update(two_workers, tmp_path):
    ends = two_workers.run(_persistent, tmp_path, "stop")
    assert all("a persistent error; the step is not saved" in end for end, _ in ends)
    assert "train.iterations_to_skip=[3]" in ends[0][0]
    assert paths.latest_iteration(tmp_path) == 2


def test_a_broken_batch_is_skipped_at_the_next_start(two_workers, tmp_path):
    assert [end for end, _ in two_workers.run(_persistent, tmp_path, "skip")] == [
        REQUEUE_EXIT_CODE
    ] * 2
    assert list(steps_to_skip(tmp_path)) == [3]
    resumed = two_workers.run(_resumed, tmp_path)
    skipping = {"model": DROPOUT, "train": {**WITH_TOKEN_0, "iterations_to_skip": [3]}}
    assert resumed == two_workers.run(run_to, None, STEPS, skipping)
    assert resumed[0]["progress"]["skipped_steps"] == 1
    assert list(resumed[0]["losses"]) == [1, 2, 4, 5, 6]


def _resumed(root):
    return run_to(
        root, STEPS, {"model": DROPOUT, "train": WITH_TOKEN_0, "checkpoint": {"save_interval": 1}}
    )


def _slow():
    slow = [At("train_step_start", step, 1, lambda context: time.sleep(0.6)) for step in (2, 3)]
    return _left(None, {"straggler": StragglerDetectionConfig(interval=2)}, *slow)


def test_a_slow_rank_is_named(two_workers):
    _, said = two_workers.run(_slow)[0]
    found = [line for line in said.splitlines() if "is slow" in line and line.startswith("step 4")]
    assert len(found) == 1
    assert "rank 1 on" in found[0]


HANGING = """
import os, sys, time
sys.path.insert(0, {repository!r})
from tests.functional_tests.checkpoint import test_faults
test_faults.hang(sys.argv[1])
"""


def hang(how):
    """In a process of its own: rank 1 sleeps, or stops, in the middle of step 2."""
    actions = {"sleeps": lambda context: time.sleep(1000), "stops": _stop}
    limit = DistributedInitConfig(
        hang_timeout_minutes=6 / 60
    )  # the first step may take three seconds
    run_to(None, STEPS, {"extra": [At("train_step_start", 2, 1, actions[how])], "dist": limit})


def _stop(context):
    os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("sleeps", "waiting for rank 1, which is in <lambda> (test_faults.py:"),
        pytest.param("stops", "rank 1 sends no heartbeat", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_hangs_is_named(tmp_path, how, words):
    script = tmp_path / "hang.py"
    script.write_text(HANGING.format(repository=str(Path(__file__).parents[3])))
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), how],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    _, said = ranks[0].communicate(timeout=120)
    ranks[1].kill()
    ranks[1].communicate()
    assert ranks[0].returncode == HANG_EXIT_CODE, said
    assert words in said
    assert "step 3 has been hanging for" in said
    assert "most recent call first" in said, "stacks"
