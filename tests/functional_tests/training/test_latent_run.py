# SPDX-License-Identifier: Apache-2.0
"""Latent attention, experts and multi-token prediction trained together, and a checkpoint between two layouts."""

import pytest
import torch
from megatron.core import parallel_state

from megatron.bridge import AutoBridge
from megatron.bridge.training.callbacks import Callback
from megatron.bridge.training.config import CheckpointConfig
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain
from tests.families import harness, next_tokens
from tests.toy_run import SEQUENCE, Record, toy_config

STEPS = 3
PP2 = {"pipeline_model_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}


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
    changes = {
        "seq_length": SEQUENCE,
        "calculate_per_token_loss": True,
        "moe_router_bias_update_rate": 0.05,
    }
    for name, value in {**changes, **layout}.items():
        assert hasattr(provider, name), name
        setattr(provider, name, value)
    config = toy_config(
        train={"train_iters": STEPS},
        checkpoint=CheckpointConfig(save=None if save is None else str(save)),
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


def export(directory, megatron, layout):
    bridge = AutoBridge.from_hf_pretrained(directory)
    model = bridge.load_megatron_model(megatron, mp_overrides=layout, wrap_with_ddp=False)
    return {
        name: weight.clone()
        for name, weight in bridge.export_hf_weights(model, show_progress=False)
    }


def test_a_checkpoint_holds_all_of_it_under_another_layout(two_workers, toy, tmp_path):
    trained = two_workers.run(train, toy, PP2, tmp_path / "run")[0][1]
    corrections = [name for name in trained if name.endswith("e_score_correction_bias")]
    assert len(corrections) == 3 + next_tokens.DEPTHS
    for weights in two_workers.run(export, toy, tmp_path / "run", EP2):
        assert weights.keys() == trained.keys()
        assert [name for name in trained if not torch.equal(weights[name], trained[name])] == []
