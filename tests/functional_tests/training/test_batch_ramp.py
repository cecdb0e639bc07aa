# SPDX-License-Identifier: Apache-2.0
"""A growing batch: samples keep their order, evaluation keeps its batches, and a run resumes in its midst."""

import json

import pytest

from megatron.bridge.checkpoint import paths
from megatron.bridge.training.config import (
    LoggerConfig,
    OptimizerConfig,
    SchedulerConfig,
    ValidationConfig,
)
from tests.functional_tests.checkpoint.runs import DROPOUT, STEPS, run_to
from tests.toy_run import run_toy

SIZES = [4, 4, 6, 8, 8, 8]
TRAIN = {"micro_batch_size": 1, "global_batch_size": 8, "rampup_batch_size": [4, 2, 14]}
RAMP = {
    "train": TRAIN,
    "scheduler": SchedulerConfig(lr_warmup_samples=12, lr_warmup_init=0.0, lr_decay_samples=70),
}
SHORT = {**RAMP, "train": {**TRAIN, "train_iters": STEPS}}
FULL = {"train": {"micro_batch_size": 1, "global_batch_size": 8}}
TP2 = {"model": {"tensor_model_parallel_size": 2}}


def test_samples_keep_their_order(two_workers):
    ramped = two_workers.run(run_to, None, STEPS, RAMP)
    full = two_workers.run(run_to, None, STEPS, FULL)
    for rank in range(2):
        rows = ramped[rank]["tokens"]
        assert [2 * len(rows[step + 1]) for step in range(STEPS)] == SIZES
        stream = [row for step in range(STEPS) for row in rows[step + 1]]
        without = [row for step in range(STEPS) for row in full[rank]["tokens"][step + 1]]
        assert stream == without[: len(stream)]
    assert ramped[0]["progress"]["consumed_train_samples"] == sum(SIZES)
    assert ramped[0]["schedule"]["num_steps"] == sum(SIZES)


@pytest.mark.parametrize("stop", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_run_resumes_in_the_midst_of_the_ramp(two_workers, tmp_path, stop):
    arguments = {**RAMP, "model": DROPOUT}
    undisturbed = two_workers.run(
        run_to, tmp_path, STEPS, {**arguments, "checkpoint": {"save_interval": stop}}
    )
    paths.write_tracker(tmp_path, stop)
    assert two_workers.run(run_to, tmp_path, STEPS, arguments) == undisturbed


def test_two_processes_learn_what_one_does(two_workers, run_in_process):
    together, split = two_workers.run(run_toy, SHORT), two_workers.run(run_toy, {**SHORT, **TP2})
    alone = run_toy(SHORT)
    for records in (together, split):
        assert records[0].losses == pytest.approx(alone.losses, rel=1.5e-7)
        assert records[0].grad_norms == pytest.approx(alone.grad_norms, rel=1.5e-6)
        assert records[0].held_out == pytest.approx(alone.held_out, rel=1.5e-7)


def test_evaluation_keeps_its_batches_and_the_log_tells_the_size(run_in_process, tmp_path):
    """With weights that stand still, what is held out has one loss, whatever the training batch."""
    still = {
        "optimizer": OptimizerConfig(lr=1e-30),
        "validation": ValidationConfig(eval_interval=1, eval_iters=1),
    }
    train = {"train_iters": STEPS, "micro_batch_size": 1}
    logger = LoggerConfig(log_interval=1, log_dir=str(tmp_path))
    ramped = run_toy({**still, "train": {**TRAIN, **train}, "logger": logger})
    full = run_toy({**still, "train": train})
    assert ramped.held_out == full.held_out
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["batch size"] for line in lines if line["kind"] == "train"] == SIZES
