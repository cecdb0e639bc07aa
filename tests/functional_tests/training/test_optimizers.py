# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's optimizers do, on a whole run, what torch's own do with the same gradients."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.optimizer import HAVE_EMERGING_OPTIMIZERS

from megatron.bridge.autotune.memory import memory_per_rank
from megatron.bridge.checkpoint import paths
from megatron.bridge.training.callbacks import Callback
from megatron.bridge.training.config import (
    DistributedDataParallelConfig,
    OptimizerConfig,
    ParameterOverride,
    SchedulerConfig,
)
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.optim.optimizer_state import parameter_shards
from megatron.bridge.training.pretrain import pretrain
from megatron.bridge.utils.errors import UserError
from tests.functional_tests.checkpoint.runs import run_to
from tests.parity import EP2, EXPERTS
from tests.toy_run import Record, initialize_by_name, run_toy, toy_config
from tests.workers import leave

muon = pytest.mark.skipif(
    not HAVE_EMERGING_OPTIMIZERS, reason="emerging-optimizers is not installed"
)
SAVING = {"save_interval": 3}
LR, DECAY, CLIP, STEPS = 1e-2, 0.1, 0.5, 10


@dataclass
class Shadow(Callback):
    """Copies of the weights that an optimizer of torch's updates with the run's gradients.

    Attributes:
        make: groups of torch's form -> optimizer.
        wanted: name and copy of a parameter -> (factor of the learning rate, weight decay).
    """

    make: Any
    wanted: Any
    worst: list = field(default_factory=list)

    def on_train_start(self, context):
        self.real = {
            name.removeprefix("module."): p for name, p in context.model[0].named_parameters()
        }
        self.copies = {
            name: p.detach().float().clone().requires_grad_() for name, p in self.real.items()
        }
        groups = []
        for name, copy in self.copies.items():
            factor, decay = self.wanted(name, copy)
            groups.append({"params": [copy], "lr": LR, "factor": factor, "weight_decay": decay})
        self.optimizer = self.make(groups)

    def on_grads_ready(self, context):
        for name, parameter in self.real.items():
            self.copies[name].grad = parameter.main_grad.float()
        torch.nn.utils.clip_grad_norm_(self.copies.values(), CLIP)

    def on_train_step_end(self, context):
        step = context.progress.step - 1
        for group in self.optimizer.param_groups:
            group["lr"] = group["factor"] * LR * (1 - step / STEPS)
        self.optimizer.step()
        differences = [
            (_master(self.real[name]) - copy).abs().max().item()
            for name, copy in self.copies.items()
        ]
        self.worst.append(max(differences))


def _master(parameter):
    """What the optimizer updates: the weight itself, or the fp32 copy that it is rounded from."""
    if parameter.dtype == torch.float32:
        return parameter
    assert torch.equal(parameter, parameter.main_param.to(parameter.dtype))
    return parameter.main_param


def followed(make, wanted, model=None, precision="fp32", **options):
    """Largest difference of a weight behind each step, and the weights that changed the least."""
    torch.set_num_threads(1)
    config = toy_config(
        model={"num_layers": 2, "qk_layernorm": True, "add_bias_linear": True, **(model or {})},
        train={"train_iters": STEPS},
        optimizer=OptimizerConfig(
            **{"lr": LR, "weight_decay": DECAY, "clip_grad": CLIP, **options}
        ),
        scheduler=SchedulerConfig(lr_decay_style="linear"),
        mixed_precision=precision,
    )
    config.model.register_pre_wrap_hook(initialize_by_name)
    shadow = Shadow(make, wanted)
    pretrain(config, forward_step, [shadow])
    assert len(shadow.worst) == STEPS
    return max(shadow.worst)


def matrices_decay(name, parameter):
    """Megatron's condition: vectors and biases do not."""
    return 1.0, DECAY if parameter.ndim > 1 else 0.0


def query_and_key_norms_decay_too(name, parameter):
    return (
        1.0,
        DECAY if parameter.ndim > 1 or "q_layernorm" in name or "k_layernorm" in name else 0.0,
    )


def ends_learn_slowly(name, parameter):
    ends = name.startswith(("embedding.", "output_layer."))
    return 0.1 if ends else 1.0, matrices_decay(name, parameter)[1]


def overridden(name, parameter):
    if name.startswith("embedding."):
        return 0.5, 0.0
    if name.startswith("decoder.layers.1.mlp."):
        return 2.0, matrices_decay(name, parameter)[1]
    return 1.0, 0.3 if name.endswith("layernorm.weight") else matrices_decay(name, parameter)[1]


OVERRIDES = [
    ParameterOverride(["embedding.*"], lr_mult=0.5, wd_mult=0.0),
    ParameterOverride(["decoder.layers.1.mlp.*"], lr=2 * LR),
    ParameterOverride(["*layernorm.weight"], weight_decay=0.3),
]


def adamw(groups):
    return torch.optim.AdamW(groups, betas=(0.9, 0.999), eps=1e-8)


CASES = {
    "AdamW": (adamw, matrices_decay, {}),
    "AdamW with decay of the norms of queries and keys": (
        adamw,
        query_and_key_norms_decay_too,
        {"apply_wd_to_qk_layernorm": True},
    ),
    "AdamW with another rate at both ends": (
        adamw,
        ends_learn_slowly,
        {"decoupled_lr": 0.1 * LR, "decoupled_min_lr": 0.0},
    ),
    "AdamW with overrides": (adamw, overridden, {"overrides": OVERRIDES}),
    "Adam with decay in the gradient": (
        lambda groups: torch.optim.Adam(groups, betas=(0.8, 0.9), eps=1e-6),
        matrices_decay,
        {"decoupled_weight_decay": False, "adam_beta1": 0.8, "adam_beta2": 0.9, "adam_eps": 1e-6},
    ),
    "SGD": (
        lambda groups: torch.optim.SGD(groups, momentum=0.7),
        matrices_decay,
        {"optimizer": "sgd", "sgd_momentum": 0.7},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_run_is_that_of_torchs_optimizer(name, run_in_process):
    make, wanted, options = CASES[name]
    assert followed(make, wanted, **options) <= 1e-6


@pytest.mark.parametrize(
    ("precision", "options"), [("bf16_mixed", {}), ("fp16_mixed", {"loss_scale": 1.0})]
)
def test_half_precision_has_master_weights_in_fp32(precision, options, run_in_process):
    """With a loss scale of 1 fp16 hands on the gradients as they are."""
    assert followed(adamw, matrices_decay, precision=precision, **options) <= 1e-6


def test_a_condition_that_is_not_met_would_be_seen(run_in_process):
    """The comparison can fail: decay of all parameters is another run."""
    assert followed(adamw, lambda name, parameter: (1.0, DECAY)) > 1e-5


class PlainMuon(torch.optim.Optimizer):
    """Momentum, five Newton-Schulz steps in fp64, and a scale by the larger side; vectors and ends have AdamW."""

    COEFFICIENTS = (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    )

    def __init__(self, groups):
        matrices = [group for group in groups if group["orthogonal"]]
        self.rest = adamw([group for group in groups if not group["orthogonal"]])
        super().__init__(matrices, {"lr": LR})
        self.param_groups += self.rest.param_groups

    @torch.no_grad()
    def step(self):
        self.rest.step()
        for group in self.param_groups:
            if group["orthogonal"]:
                [weight] = group["params"]
                momentum = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
                momentum.mul_(0.95).add_(weight.grad, alpha=0.05)
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.sub_(group["lr"] * max(weight.shape) ** 0.5 * self.orthogonal(momentum))

    def orthogonal(self, matrix):
        x = matrix.double() / matrix.double().norm()
        for a, b, c in self.COEFFICIENTS:
            square = x @ x.T
            x = a * x + (b * square + c * square @ square) @ x
        return x.float()


@muon
def test_muon_orthogonalises_matrices_and_leaves_the_rest_to_adam(run_in_process):
    def make(groups):
        for group in groups:
            [copy] = group["params"]
            group["orthogonal"] = (
                copy.ndim == 2 and copy.shape[0] != 96
            )  # rows of the vocabulary are no matrix
        return PlainMuon(groups)

    options = {"optimizer": "muon", "muon_split_qkv": False, "muon_fp32_matmul_prec": "highest"}
    assert followed(make, matrices_decay, **options) <= 1e-5


class PlainLion(torch.optim.Optimizer):
    """Steps by the sign of an average of gradients."""

    def __init__(self, groups):
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for weight in group["params"]:
                average = self.state[weight].setdefault("average", torch.zeros_like(weight))
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.sub_(group["lr"] * (0.8 * average + 0.2 * weight.grad).sign())
                average.mul_(0.9).add_(weight.grad, alpha=0.1)


LION = {"optimizer": "lion", "lion_beta1": 0.8, "lion_beta2": 0.9}


@muon
def test_lion_updates_all_weights_by_signs(run_in_process):
    assert followed(PlainLion, matrices_decay, **LION) <= 1e-5


@muon
def test_lion_resumes_and_goes_on_under_another_layout(two_workers, tmp_path):
    options = OptimizerConfig(**LION, lr=1e-3)
    arguments = {"optimizer": options, "mixed_precision": "bf16_mixed"}
    undisturbed = two_workers.run(
        run_to, tmp_path, 6, {**arguments, "model": TP2, "checkpoint": SAVING}
    )
    paths.write_tracker(tmp_path, 3)
    assert two_workers.run(run_to, tmp_path, 6, {**arguments, "model": TP2}) == undisturbed
    paths.write_tracker(tmp_path, 3)
    elsewhere = two_workers.run(
        run_to, tmp_path, 6, {**arguments, "train": {"micro_batch_size": 1}}
    )
    assert elsewhere[0]["losses"] == pytest.approx(undisturbed[0]["losses"], rel=2e-3)


@muon
def test_lion_updates_what_muon_does_not(two_workers, tmp_path):
    options = OptimizerConfig(**MUON, muon_scalar_optimizer="lion", lion_beta1=0.9)
    arguments = {"optimizer": options, "train": {"micro_batch_size": 1}}
    undisturbed = two_workers.run(run_to, tmp_path, 6, {**arguments, "checkpoint": SAVING})
    paths.write_tracker(tmp_path, 3)
    assert two_workers.run(run_to, tmp_path, 6, arguments) == undisturbed


MUON = {"optimizer": "muon", "muon_fp32_matmul_prec": "highest", "lr": LR, "weight_decay": DECAY}
TP2 = {"tensor_model_parallel_size": 2}


@pytest.fixture(scope="module")
def alone():
    """Losses of one process with Muon."""
    torch.set_num_threads(1)
    losses = run_toy({"optimizer": OptimizerConfig(**MUON)}).losses
    leave()
    return losses


@muon
@pytest.mark.parametrize(
    "mode",
    [
        pytest.param("duplicated", marks=pytest.mark.slow),
        pytest.param("distributed", marks=pytest.mark.slow),
        "blockwise",
    ],
)
def test_muon_under_tensor_parallelism_updates_whole_matrices(two_workers, alone, mode):
    """All but ``blockwise``, Megatron-Core's default, whose result depends on the layout."""
    optimizer = OptimizerConfig(**MUON, muon_tp_mode=mode)
    losses = two_workers.run(run_toy, {"model": TP2, "optimizer": optimizer})[0].losses
    difference = max(abs(value / wanted - 1) for value, wanted in zip(losses, alone, strict=True))
    assert difference > 1e-4 if mode == "blockwise" else difference <= 1e-5


@muon
def test_muon_resumes_and_goes_on_under_another_layout(two_workers, tmp_path):
    arguments = {"optimizer": OptimizerConfig(**MUON), "mixed_precision": "bf16_mixed"}
    undisturbed = two_workers.run(
        run_to, tmp_path, 6, {**arguments, "model": TP2, "checkpoint": SAVING}
    )
    paths.write_tracker(tmp_path, 3)
    assert two_workers.run(run_to, tmp_path, 6, {**arguments, "model": TP2}) == undisturbed
    paths.write_tracker(tmp_path, 3)
    elsewhere = two_workers.run(run_to, tmp_path, 6, arguments)[0]["losses"]
    assert [elsewhere[step] for step in (4, 5, 6)] == pytest.approx(
        [undisturbed[0]["losses"][step] for step in (4, 5, 6)], rel=2e-3
    )


BY_LAYER = {**MUON, "use_layer_wise_distributed_optimizer": True}


class HeldState(Callback):
    """Bytes of the optimizer's state and master weights on this rank."""

    def on_train_step_end(self, context):
        self.bytes = sum(
            tensor.nbytes
            for shard in parameter_shards(context.optimizer)
            for tensor in shard.tensors.values()
        )


def hold_state(options, model):
    held = HeldState()
    # without clipping: the norm is a sum in another order
    optimizer = OptimizerConfig(**options, clip_grad=0.0)
    arguments = {"optimizer": optimizer, "mixed_precision": "bf16_mixed", "model": model}
    micro = {"train": {"micro_batch_size": 1}}
    losses = run_to(None, 3, {**arguments, **micro, "extra": [held]})["losses"]
    return held.bytes, losses


@muon
@pytest.mark.parametrize(
    "model",
    [{}, pytest.param({**EXPERTS, **EP2}, marks=pytest.mark.slow)],
    ids=["dense", "experts"],
)
def test_muon_whose_matrices_are_distributed_learns_the_same(two_workers, model):
    """Each rank has the state of its matrices alone, as much as is counted."""
    whole = two_workers.run(hold_state, MUON, model)
    shared = two_workers.run(hold_state, BY_LAYER, model)
    assert [losses for _, losses in shared] == [losses for _, losses in whole]
    assert max(size for size, _ in shared) < 0.7 * whole[0][0] or model
    for options, found in ((MUON, whole), (BY_LAYER, shared)):
        optimizer = OptimizerConfig(**options)
        config = toy_config(mixed_precision="bf16_mixed", optimizer=optimizer, model=model)
        memory = memory_per_rank(config.resolve(2).config, 2)[0]
        assert memory.optimizer == max(size for size, _ in found)


@muon
def test_muon_whose_matrices_are_distributed_resumes_also_elsewhere(two_workers, tmp_path):
    options = {"mixed_precision": "bf16_mixed", "train": {"micro_batch_size": 1}}
    arguments = {**options, "optimizer": OptimizerConfig(**BY_LAYER)}
    undisturbed = two_workers.run(run_to, tmp_path, 6, {**arguments, "checkpoint": SAVING})
    paths.write_tracker(tmp_path, 3)
    assert two_workers.run(run_to, tmp_path, 6, arguments) == undisturbed
    paths.write_tracker(tmp_path, 3)
    whole = {**options, "optimizer": OptimizerConfig(**MUON)}
    elsewhere = two_workers.run(run_to, tmp_path, 6, whole)
    for result, expected in zip(elsewhere, undisturbed, strict=True):
        assert result["losses"] == pytest.approx(expected["losses"], rel=2e-4)


@dataclass
class Gradients(Callback):
    """Types of the gradients, and the norm of the first step's."""

    types: set = field(default_factory=set)

    def on_grads_ready(self, context):
        self.types |= {parameter.main_grad.dtype for parameter in context.model[0].parameters()}


def reduced(in_fp32):
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=in_fp32)
    config = toy_config(train={"train_iters": 1}, mixed_precision="bf16_mixed", ddp=ddp)
    config.model.register_pre_wrap_hook(initialize_by_name)
    record, gradients = Record(), Gradients()
    try:
        pretrain(config, forward_step, [record, gradients])
    finally:
        parallel_state.destroy_model_parallel()
    return record.grad_norms[0], gradients.types


def test_gradients_are_reduced_in_the_type_that_is_asked_for(two_workers, run_in_process):
    alone, _ = reduced(True)
    exact, types = two_workers.run(reduced, True)[0]
    assert types == {torch.float32}
    assert exact == pytest.approx(alone, rel=2e-7)
    rounded, types = two_workers.run(reduced, False)[0]
    assert types == {torch.bfloat16}
    assert 1e-6 < abs(rounded / alone - 1) < 1e-2


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            [ParameterOverride(["embeding.*"], lr=1e-3)],
            "the pattern embeding.* matches no trained parameter",
        ),
        (
            [ParameterOverride(["embedding.*"], lr=1e-3), ParameterOverride(["*.weight"], lr=1e-4)],
            "two entries match embedding.word_embeddings.weight and set max_lr to 0.001 and 0.0001",
        ),
    ],
)
def test_overrides_that_are_not_meant_are_refused(overrides, words, run_in_process):
    with pytest.raises(UserError, match=r"optimizer\.overrides") as refusal:
        followed(adamw, matrices_decay, overrides=overrides)
    assert words in str(refusal.value)
