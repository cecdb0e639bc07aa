# SPDX-License-Identifier: Apache-2.0
"""Optimizer state sharded within groups of ranks that each hold a whole: numbers and checkpoints of any other."""

import pytest

from megatron.bridge.checkpoint import paths
from megatron.bridge.training.config import DistributedDataParallelConfig
from tests.functional_tests.checkpoint.runs import DROPOUT, STEPS, run_to, tensors_of
from tests.toy_run import run_toy, whole_weights

HYBRID = {"use_distributed_optimizer": True, "num_distributed_optimizer_instances": 2}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
MICRO = {"train": {"micro_batch_size": 1}}


@pytest.mark.parametrize("extra", [pytest.param({}, marks=pytest.mark.slow), OVERLAP])
def test_four_processes_in_two_instances_learn_what_one_does(four_workers, run_in_process, extra):
    arguments = {**MICRO, "ddp": DistributedDataParallelConfig(**HYBRID, **extra)}
    records, alone = four_workers.run(run_toy, arguments), run_toy(MICRO)
    assert records[0].losses == pytest.approx(alone.losses, rel=1.5e-7)
    assert records[0].grad_norms == pytest.approx(alone.grad_norms, rel=1.5e-6)
    weights, expected = whole_weights(records), whole_weights([alone])
    assert max((weights[name] - expected[name]).abs().max() for name in expected) <= 8e-7


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.slow), "bf16_mixed"])
def test_a_resumed_run_is_the_undisturbed_one_and_other_layouts_read_it(
    four_workers, tmp_path, precision
):
    arguments = {**MICRO, "ddp": HYBRID, "mixed_precision": precision}
    exact = {**arguments, "model": DROPOUT}
    undisturbed = four_workers.run(
        run_to, tmp_path, STEPS, {**exact, "checkpoint": {"save_interval": 3}}
    )
    paths.write_tracker(tmp_path, 3)
    assert four_workers.run(run_to, tmp_path, STEPS, exact) == undisturbed


def test_a_checkpoint_is_the_one_of_plain_sharding(four_workers, tmp_path):
    """Whatever is read from it under another layout: the whole tensors are equal, the optimizer's, too."""
    saved = {}
    for name, ddp in (("hybrid", HYBRID), ("plain", {"use_distributed_optimizer": True})):
        four_workers.run(
            run_to, tmp_path / name, 2, {**MICRO, "ddp": ddp, "checkpoint": {"save_interval": 2}}
        )
        saved[name] = tensors_of(paths.resolve(tmp_path / name))
    assert saved["hybrid"].keys() == saved["plain"].keys()
    for key, value in saved["plain"].items():
        assert (saved["hybrid"][key] - value).abs().max() <= 1e-6, key


@pytest.mark.slow  # test_fully_sharded.py has it for two processes
def test_a_run_goes_on_under_another_layout(four_workers, tmp_path):
    before = {**MICRO, "ddp": HYBRID}
    after = {**MICRO, "model": {"tensor_model_parallel_size": 2}, "ddp": {**HYBRID, **OVERLAP}}
    undisturbed = four_workers.run(
        run_to, tmp_path, STEPS, {**before, "checkpoint": {"save_interval": 3}}
    )
    paths.write_tracker(tmp_path, 3)
    resumed = four_workers.run(run_to, tmp_path, STEPS, after)
    for step, loss in undisturbed[0]["losses"].items():
        assert resumed[0]["losses"][step] == pytest.approx(loss, rel=1e-6)
