# SPDX-License-Identifier: Apache-2.0
"""A toy run on a GPU without Transformer Engine learns like the same run on a CPU."""

import json
import os
import subprocess
import sys

import pytest
import torch.nn.functional as F

from megatron.bridge.training.callbacks import Callback
from tests.unit_tests.project.tree import ROOT

SHARDED = "rows of weights"
MEGATRON_SHARDED = "rows of weights, by Megatron-FSDP"
FORMS = {
    SHARDED: {},
    MEGATRON_SHARDED: {},
    "dense": {},
    "windows and sinks": {"window_size": (7, 0), "softmax_type": "learnable"},
    "zero-centred norms of queries and keys": {
        "qk_layernorm": True,
        "layernorm_zero_centered_gamma": True,
    },
    "experts": {
        "num_moe_experts": 4,
        "moe_ffn_hidden_size": 64,
        "moe_router_topk": 2,
        "moe_grouped_gemm": True,
    },
    "all of it computed again": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}


class Losses(Callback):
    """Of each step."""

    def __init__(self):
        self.found = []

    def on_train_step_end(self, context):
        self.found.append(context.loss_dict["lm loss"].item())


def train(form, precision):
    """What the subprocess does: losses as JSON, in its last line."""
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain
    from tests.toy_run import initialize_by_name, toy_config

    settings = {"activation_func": F.silu, "backend": "torch", **FORMS[form]}
    config = toy_config(model=settings, train={"train_iters": 5}, mixed_precision=precision)
    config.dist.use_torch_fsdp2 = form == SHARDED
    config.ddp.use_megatron_fsdp = form == MEGATRON_SHARDED
    config.model.register_pre_wrap_hook(initialize_by_name)
    losses = Losses()
    pretrain(config, forward_step, [losses])
    sys.stdout.write(json.dumps(losses.found) + "\n")


def losses_of(form, precision, **environment):
    """In a process of its own: a process with a GPU cannot forget it."""
    code = f"from tests.functional_tests.training.test_on_gpu import train; train({form!r}, {precision!r})"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=os.environ | environment,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("bf16_mixed", 2e-2)])
@pytest.mark.parametrize("form", FORMS)
def test_losses_are_those_of_a_cpu(form, precision, tolerance):
    expected = losses_of(form, precision, CUDA_VISIBLE_DEVICES="")
    found = losses_of(form, precision)
    assert found == pytest.approx(expected, rel=tolerance)
    assert found[-1] < found[0]
