# SPDX-License-Identifier: Apache-2.0
"""What is taken for a spike of the loss, and what for a sign of life."""

from types import SimpleNamespace

import pytest
from megatron.core import parallel_state

from megatron.bridge.checkpoint.model_io import unwrap
from megatron.bridge.training.callbacks import Callback
from megatron.bridge.training.callbacks.guard.hang_detection import HangDetection
from megatron.bridge.training.config import (
    CheckpointConfig,
    FaultToleranceConfig,
    RerunStateMachineConfig,
)
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain
from megatron.bridge.training.resiliency.fault_tolerance import FaultTolerance
from tests.toy_run import toy_config

EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_grouped_gemm": True,
    "moe_ffn_hidden_size": 32,
    "moe_token_dispatcher_type": "alltoall",
    "moe_aux_loss_coeff": 0.0,
}
WATCHED = RerunStateMachineConfig(
    check_for_spiky_loss=True, spiky_loss_factor=3.0, spiky_loss_samples=2
)


class Spike(Callback):
    """Much larger logits from a step on."""

    def __init__(self, step):
        self._step = step

    def on_train_step_start(self, context):
        if context.progress.step + 1 == self._step:
            unwrap(context.model[0]).output_layer.weight.data.mul_(1000)


def _run(train, spike=None, **blocks):
    """The step that a run reaches, of which one step may have a spike."""
    config = toy_config(model={"num_layers": 1}, train=train, rerun_state_machine=WATCHED, **blocks)
    try:
        return pretrain(config, forward_step, [Spike(spike)]).progress.step
    finally:
        parallel_state.destroy_model_parallel()


@pytest.mark.usefixtures("one_process")
def test_a_larger_batch_is_no_spike():
    """Four times as many tokens from step 5 on: their losses add up to more, and are the same in the mean."""
    assert _run({"train_iters": 6, "rampup_batch_size": [2, 6, 8]}) == 6


@pytest.mark.usefixtures("one_process")
def test_a_spike_is_found_also_by_a_run_that_goes_on(tmp_path):
    """The first losses of the run are what it is compared with, not the first ones after a restart."""
    steps, checkpoint = {"train_iters": 6}, CheckpointConfig(save=str(tmp_path))
    assert _run(steps | {"exit_interval": 3}, checkpoint=checkpoint) == 3
    with pytest.raises(
        FloatingPointError, match=r"step 5: the spiking loss is .*: a persistent error"
    ):
        _run(steps, spike=5, checkpoint=checkpoint)


class Spoiled(Callback):
    """A gradient that is wrong once; the biases of the routers at the end."""

    def __init__(self, step):
        self._step = step

    def on_grads_ready(self, context):
        if context.progress.step == self._step:
            next(context.model[0].parameters()).main_grad.view(-1)[0] = float("nan")

    def on_train_end(self, context):
        buffers = dict(unwrap(context.model[0]).named_buffers())
        self.biases = [buffers[name].tolist() for name in buffers if name.endswith("expert_bias")]


@pytest.mark.usefixtures("one_process")
def test_a_repeated_step_moves_the_biases_of_routers_once():
    """They are moved where gradients are reduced, which happens again; the repeated step would route otherwise."""
    biases = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
    found = []
    for step in (None, 1):
        spoiled = Spoiled(step)
        model = {"num_layers": 1, **EXPERTS, **biases}
        config = toy_config(
            model=model, train={"train_iters": 3}, rerun_state_machine=RerunStateMachineConfig()
        )
        pretrain(config, forward_step, [spoiled])
        parallel_state.destroy_model_parallel()
        found.append(spoiled.biases)
    assert found[0] == found[1]
    assert any(found[0][0]), "they have moved"


EVALUATIONS = [f"{kind}_step_end" for kind in ("eval", "test")]


@pytest.mark.parametrize(
    "event", ["train_step_start", "grads_ready", "train_step_end", *EVALUATIONS, "train_end"]
)
def test_what_moves_on_does_not_hang(event):
    """A test evaluation that takes longer than the timeout would end a run before its last save."""
    detection, run = HangDetection(minutes=1), SimpleNamespace(progress=SimpleNamespace(step=7))
    getattr(detection, f"on_{event}")(run)
    assert (detection._phases, detection._step) == (1, 7)


class Client:
    """What a launcher is told."""

    def __init__(self):
        self.told = []
        self.init_workload_monitoring = lambda: None
        self.start_section = lambda name: self.told.append(f"{name} begins")
        self.end_section = lambda name: self.told.append(f"{name} ends")
        self.send_heartbeat = lambda: self.told.append("beat")


@pytest.mark.parametrize("kind", ["train", "eval", "test"])
def test_each_step_gives_a_sign_of_life(kind):
    client = Client()
    callback = FaultTolerance(FaultToleranceConfig(), client, save=None)
    getattr(callback, f"on_{kind}_step_start")(None)
    getattr(callback, f"on_{kind}_step_end")(None)
    assert client.told == [
        "setup begins", "setup ends", "step begins", "beat", "step ends", "checkpointing begins"
    ]  # fmt: skip
