# SPDX-License-Identifier: Apache-2.0
"""Latent attention, experts and multi-token prediction trained together: layouts, and a checkpoint between two."""

import dataclasses

import pytest
import torch
from megatron.core import parallel_state

from megatron.bridge import AutoBridge
from megatron.bridge.models import MLAModelProvider
from megatron.bridge.training.callbacks import Callback
from megatron.bridge.training.config import CheckpointConfig
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain
from tests.families import harness, next_tokens
from tests.toy_run import SEQUENCE, Record, initialize_by_name, toy_config

STEPS = 3
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_tensor_parallel_size": 1}
LAYOUTS = {
    "tp2": TP2,
    "pp2": {"pipeline_model_parallel_size": 2},
    "ep2": {"expert_model_parallel_size": 2},
}
LOSS, WEIGHTS = 1e-5, 2e-3
"""Largest difference of two losses over their size, and of two weights."""


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """A checkpoint with random numbers."""
    directory = tmp_path_factory.mktemp("latent") / "hf"
    harness.save(harness.hf_model(next_tokens.ROW), directory)
    next_tokens.add_layers(directory)
    return directory


class Exported(Callback):
    """The weights at the end of a run, under the names of Hugging Face."""

    def __init__(self, bridge):
        self.bridge, self.weights = bridge, {}

    def on_train_end(self, context):
        stream = self.bridge.export_hf_weights(context.model, show_progress=False)
        self.weights = {name: weight.clone() for name, weight in stream}


def train(directory, layout, save=None):
    """Losses and final weights of a short run, on this rank."""
    bridge = AutoBridge.from_hf_pretrained(directory)
    provider = bridge.to_megatron_provider()
    changes = {"seq_length": SEQUENCE, "calculate_per_token_loss": True, "moe_router_bias_update_rate": 0.05}
    for name, value in {**changes, **layout}.items():
        assert hasattr(provider, name), name
        setattr(provider, name, value)
    config = toy_config(
        train={"train_iters": STEPS}, checkpoint=CheckpointConfig(save=None if save is None else str(save))
    )
    config.model = provider
    record, exported = Record(), Exported(bridge)
    try:
        pretrain(config, forward_step, [record, exported])
    finally:
        parallel_state.destroy_model_parallel()
    return record.losses, exported.weights


@pytest.fixture(scope="module")
def single(toy):
    torch.set_num_threads(1)
    return train(toy, {})


def test_everything_learns(toy, single):
    before, after = harness.read_weights(toy), single[1]
    assert before.keys() == after.keys()
    assert [name for name in before if torch.equal(before[name], after[name])] == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_train_alike(two_workers, toy, single, layout):
    compare(two_workers.run(train, toy, LAYOUTS[layout]), single)


@pytest.mark.parametrize("kind", ["all_gather", "a2a"])
def test_context_parallel(two_workers, toy, kind):
    # Megatron-Core averages the further predictions over each rank's tokens, not over all: without their loss
    without = {"mtp_loss_scaling_factor": 0.0}
    found = two_workers.run(train, toy, {"context_parallel_size": 2, "cp_comm_type": kind, **without})
    compare(found, train(toy, without))


def compare(found, single):
    for losses, weights in found:
        assert losses == pytest.approx(single[0], rel=LOSS)
        apart = {name: (weights[name] - wanted).abs().max().item() for name, wanted in single[1].items()}
        assert {name: value for name, value in apart.items() if value > WEIGHTS} == {}


def train_dense(layout):
    """Losses and gradient norms of a model without experts: those ask for sequence parallelism."""
    config = toy_config(train={"train_iters": STEPS})
    sizes = {"q_lora_rank": 12, "kv_lora_rank": 20, "qk_head_dim": 6, "qk_pos_emb_head_dim": 4, "v_head_dim": 10}
    shared = {field.name: getattr(config.model, field.name) for field in dataclasses.fields(config.model)}
    own = {"num_query_groups": None, "multi_latent_attention": True, "qk_layernorm": True}
    config.model = MLAModelProvider(**{**shared, **sizes, **own, **layout})
    config.model.register_pre_wrap_hook(initialize_by_name)
    record = Record()
    try:
        pretrain(config, forward_step, [record])
    finally:
        parallel_state.destroy_model_parallel()
    return record.losses, record.grad_norms


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_gradients_of_shared_keys_are_those_of_all_heads(two_workers, sequence_parallel):
    torch.set_num_threads(1)
    layout = {"tensor_model_parallel_size": 2, "sequence_parallel": sequence_parallel}
    losses, norms = train_dense({})
    for found in two_workers.run(train_dense, layout):
        assert found[0] == pytest.approx(losses, rel=LOSS)
        assert found[1] == pytest.approx(norms, rel=1e-4)


def export(directory, megatron, layout):
    bridge = AutoBridge.from_hf_pretrained(directory)
    model = bridge.load_megatron_model(megatron, mp_overrides=layout, wrap_with_ddp=False)
    return {name: weight.clone() for name, weight in bridge.export_hf_weights(model, show_progress=False)}


def test_a_checkpoint_holds_all_of_it_under_another_layout(two_workers, toy, tmp_path):
    trained = two_workers.run(train, toy, LAYOUTS["pp2"], tmp_path / "run")[0][1]
    corrections = [name for name in trained if name.endswith("e_score_correction_bias")]
    assert len(corrections) == 3 + next_tokens.DEPTHS
    for weights in two_workers.run(export, toy, tmp_path / "run", LAYOUTS["ep2"]):
        assert weights.keys() == trained.keys()
        assert [name for name in trained if not torch.equal(weights[name], trained[name])] == []
