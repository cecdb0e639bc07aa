# SPDX-License-Identifier: Apache-2.0
"""Optimizer state, or weights too, sharded within groups of ranks that each hold a whole: numbers and checkpoints."""

import pytest
import torch

from megatron.bridge.autotune.memory import memory_per_rank
from megatron.bridge.backends.fsdp.sharded_rows import local_rows
from megatron.bridge.checkpoint import paths
from megatron.bridge.training.callbacks import Callback
from megatron.bridge.training.callbacks.observe.metrics import params_norm
from megatron.bridge.training.config import DistributedDataParallelConfig, DistributedInitConfig
from tests.functional_tests.checkpoint.runs import DROPOUT, STEPS, run_to, tensors_of
from tests.parity import CP2, EP2, EXPERTS, PP2, TP2_SP
from tests.toy_run import run_toy, toy_config, whole_weights
from tests.workers import leave

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


COPIES = {"num_distributed_optimizer_instances": 2}
MEGATRON = {"use_megatron_fsdp": True, **COPIES}
FULLY_SHARDED = {
    "fsdp2": {"dist": DistributedInitConfig(use_torch_fsdp2=True), "ddp": COPIES},
    "megatron": {"ddp": MEGATRON},
    "megatron, state and gradients": {
        "ddp": {**MEGATRON, "data_parallel_sharding_strategy": "optim_grads"}
    },
    "megatron, state": {"ddp": {**MEGATRON, "data_parallel_sharding_strategy": "optim"}},
}
BOTH_KINDS = [FULLY_SHARDED["fsdp2"], FULLY_SHARDED["megatron"]]


def learn(arguments):
    """The run of this rank, with the norm of the whole weights at its end."""
    norms = []

    class Norm(Callback):
        def on_train_end(self, context):
            norms.append(params_norm(context.optimizer))

    arguments = {**arguments, "ddp": DistributedDataParallelConfig(**arguments.get("ddp", {}))}
    return run_toy(arguments, callbacks=[Norm()]), norms[0]


def check_that_four_learn_what_one_does(four_workers, sharding, model):
    torch.set_num_threads(1)
    whole = {name: value for name, value in model.items() if "parallel" not in name}
    alone, norm = learn({**MICRO, "model": whole})
    leave()
    several = four_workers.run(learn, {**MICRO, **sharding, "model": model})
    records = [record for record, _ in several]
    assert records[0].losses == pytest.approx(alone.losses, rel=1.5e-7)
    assert records[0].grad_norms == pytest.approx(alone.grad_norms, rel=1.5e-6)
    weights, expected = whole_weights(records), whole_weights([alone])
    assert max((weights[name] - expected[name]).abs().max() for name in expected) <= 8e-7
    assert [counted for _, counted in several] == [pytest.approx(norm, rel=1e-6)] * 4


@pytest.mark.parametrize(
    "sharding",
    [
        FULLY_SHARDED["fsdp2"],
        FULLY_SHARDED["megatron"],
        pytest.param(FULLY_SHARDED["megatron, state and gradients"], marks=pytest.mark.slow),
        FULLY_SHARDED["megatron, state"],
    ],
    ids=FULLY_SHARDED,
)
def test_copies_of_full_shards_learn_what_one_process_does(four_workers, sharding):
    check_that_four_learn_what_one_does(four_workers, sharding, {})


@pytest.mark.parametrize("sharding", BOTH_KINDS, ids=["fsdp2", "megatron"])
@pytest.mark.parametrize(
    "model",
    [pytest.param(CP2, marks=pytest.mark.slow), {**EXPERTS, **EP2}],
    ids=["context", "experts of two ranks"],
)
def test_copies_of_full_shards_in_other_layouts(four_workers, sharding, model):
    check_that_four_learn_what_one_does(four_workers, sharding, model)


@pytest.mark.parametrize("sharding", BOTH_KINDS, ids=["fsdp2", "megatron"])
@pytest.mark.parametrize("model", [TP2_SP, PP2], ids=["tensor", "stages"])
def test_copies_that_are_whole(four_workers, sharding, model):
    """Two replicas, each a copy of its own: nothing is sharded."""
    check_that_four_learn_what_one_does(four_workers, sharding, model)


@pytest.mark.parametrize("sharding", BOTH_KINDS, ids=["fsdp2", "megatron"])
@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.slow), "bf16_mixed"])
def test_a_resumed_run_of_copies_is_the_undisturbed_one(
    four_workers, tmp_path, sharding, precision
):
    exact = {**MICRO, **sharding, "mixed_precision": precision, "model": DROPOUT}
    undisturbed = four_workers.run(
        run_to, tmp_path, STEPS, {**exact, "checkpoint": {"save_interval": 3}}
    )
    paths.write_tracker(tmp_path, 3)
    assert four_workers.run(run_to, tmp_path, STEPS, exact) == undisturbed


@pytest.mark.parametrize("sharding", BOTH_KINDS, ids=["fsdp2", "megatron"])
def test_a_checkpoint_of_copies_is_that_of_the_distributed_optimizer(
    four_workers, tmp_path, sharding
):
    saved = {}
    plain = {"ddp": {"use_distributed_optimizer": True}}
    for name, kind in (("copies", sharding), ("plain", plain)):
        four_workers.run(
            run_to, tmp_path / name, 2, {**MICRO, **kind, "checkpoint": {"save_interval": 2}}
        )
        saved[name] = tensors_of(paths.resolve(tmp_path / name))
    assert saved["copies"].keys() == saved["plain"].keys()
    for key, value in saved["plain"].items():
        assert (saved["copies"][key] - value).abs().max() <= 1e-6, key


class Held(Callback):
    """Numbers of fp32 weights that this rank keeps."""

    def on_train_step_end(self, context):
        weights = [parameter for chunk in context.model for parameter in chunk.parameters()]
        self.found = sum(local_rows(weight).numel() for weight in weights)


def hold(arguments):
    held = Held()
    run_to(None, 1, {**arguments, "extra": [held]})
    return held.found


def test_each_rank_holds_half_and_the_dry_run_says_so(four_workers):
    sharding = FULLY_SHARDED["fsdp2"]
    found = four_workers.run(hold, {**MICRO, **sharding, "mixed_precision": "bf16_mixed"})
    config = toy_config(
        mixed_precision="bf16_mixed",
        dist=sharding["dist"],
        ddp=DistributedDataParallelConfig(**COPIES),
        **MICRO,
    )
    memory = memory_per_rank(config.resolve(4).config, 4)[0]
    assert found == [memory.parameters // 2] * 4
    assert memory.optimizer == 2 * 4 * found[0]  # both moments
