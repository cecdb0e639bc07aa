# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's optimizers do, on a whole run, what torch's own do with the same gradients."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from megatron.core.optimizer import HAVE_EMERGING_OPTIMIZERS

from megatron.bridge.training.callbacks import Callback
from megatron.bridge.training.config import OptimizerConfig, ParameterOverride, SchedulerConfig
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain
from megatron.bridge.utils.errors import UserError
from tests.toy_run import initialize_by_name, toy_config

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
        self.real = {name.removeprefix("module."): p for name, p in context.model[0].named_parameters()}
        self.copies = {name: p.detach().clone().requires_grad_() for name, p in self.real.items()}
        groups = []
        for name, copy in self.copies.items():
            factor, decay = self.wanted(name, copy)
            groups.append({"params": [copy], "lr": LR, "factor": factor, "weight_decay": decay})
        self.optimizer = self.make(groups)

    def on_grads_ready(self, context):
        for name, parameter in self.real.items():
            self.copies[name].grad = parameter.main_grad.clone()
        torch.nn.utils.clip_grad_norm_(self.copies.values(), CLIP)

    def on_train_step_end(self, context):
        step = context.progress.step - 1
        for group in self.optimizer.param_groups:
            group["lr"] = group["factor"] * LR * (1 - step / STEPS)
        self.optimizer.step()
        differences = [(self.real[name] - copy).abs().max().item() for name, copy in self.copies.items()]
        self.worst.append(max(differences))


def followed(make, wanted, model=None, **options):
    """Largest difference of a weight behind each step, and the weights that changed the least."""
    torch.set_num_threads(1)
    config = toy_config(
        model={"num_layers": 2, "qk_layernorm": True, "add_bias_linear": True, **(model or {})},
        train={"train_iters": STEPS},
        optimizer=OptimizerConfig(**{"lr": LR, "weight_decay": DECAY, "clip_grad": CLIP, **options}),
        scheduler=SchedulerConfig(lr_decay_style="linear"),
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
    return 1.0, DECAY if parameter.ndim > 1 or "q_layernorm" in name or "k_layernorm" in name else 0.0


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


@pytest.mark.skipif(not HAVE_EMERGING_OPTIMIZERS, reason="emerging-optimizers is not installed")
def test_muon_orthogonalises_matrices_and_leaves_the_rest_to_adam(run_in_process):
    def make(groups):
        for group in groups:
            [copy] = group["params"]
            group["orthogonal"] = copy.ndim == 2 and copy.shape[0] != 96  # rows of the vocabulary are no matrix
        return PlainMuon(groups)

    options = {"optimizer": "muon", "muon_split_qkv": False, "muon_fp32_matmul_prec": "highest"}
    assert followed(make, matrices_decay, **options) <= 1e-5


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            [ParameterOverride(["embeding.*"], lr=1e-3)],
            "the pattern embeding.* names no parameter that is trained",
        ),
        (
            [ParameterOverride(["embedding.*"], lr=1e-3), ParameterOverride(["*.weight"], lr=1e-4)],
            "two entries name embedding.word_embeddings.weight and give max_lr as 0.001 and 0.0001",
        ),
    ],
)
def test_overrides_that_are_not_meant_are_refused(overrides, words, run_in_process):
    with pytest.raises(UserError, match=r"optimizer\.overrides") as refusal:
        followed(adamw, matrices_decay, overrides=overrides)
    assert words in str(refusal.value)
