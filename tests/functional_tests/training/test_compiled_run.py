# SPDX-License-Identifier: Apache-2.0
"""Training with the kernels of GPUs, compiled by Inductor for this machine's CPU."""

import pytest
import torch
from megatron.core import tensor_parallel
from megatron.core.models.common.embeddings import rope_utils

from megatron.bridge.backends.kernels import compiled, eager, norms
from megatron.bridge.training.callbacks import Callback
from megatron.bridge.training.config import ValidationConfig
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain
from tests.toy_run import Record, initialize_by_name, toy_config

STEPS = 5


class Graphs(Callback):
    """How many graphs have been compiled at the end of each step."""

    def __init__(self):
        self.counts = []

    def on_train_step_end(self, context):
        from torch._dynamo.utils import counters

        self.counts.append(counters["stats"]["unique_graphs"])


def run(precision):
    config = toy_config(
        train={"train_iters": STEPS},
        model={"num_layers": 2, "qk_layernorm": True},
        validation=ValidationConfig(eval_iters=0),  # without gradients other graphs are compiled
        mixed_precision=precision,
    )
    config.model.register_pre_wrap_hook(initialize_by_name)
    record, graphs = Record(), Graphs()
    pretrain(config, forward_step, [record, graphs])
    return record, graphs.counts


@pytest.fixture
def with_compiled_kernels(monkeypatch):
    """Norms, rotary embeddings and the loss as on a GPU."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    for module, name in (
        (rope_utils, "_apply_rotary_pos_emb_bshd"),
        (rope_utils, "_apply_rotary_pos_emb_thd"),
        (tensor_parallel, "vocab_parallel_cross_entropy"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name))  # put back at the end
    monkeypatch.setattr(compiled, "can_compile", lambda: True)
    monkeypatch.setattr(eager, "install", compiled.install)
    monkeypatch.setattr(
        norms.RMSNorm,
        "forward",
        lambda norm, x: compiled.rms_norm(x, norm.weight, norm.eps, norm.zero_centered_gamma),
    )


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-6), ("bf16_mixed", 2e-2)])
def test_a_run_with_compiled_kernels_is_the_eager_one(
    request, run_in_process, precision, tolerance
):
    """Nothing is compiled after the second step; a break of a graph would be an error."""
    expected, _ = run(precision)
    request.getfixturevalue("with_compiled_kernels")
    found, counts = run(precision)
    assert found.losses == pytest.approx(expected.losses, rel=tolerance)
    assert found.grad_norms == pytest.approx(expected.grad_norms, rel=10 * tolerance)
    assert counts[1] >= 5  # norms and rotations, each in both directions, and the loss
    assert counts[1:] == counts[1:2] * (STEPS - 1)
