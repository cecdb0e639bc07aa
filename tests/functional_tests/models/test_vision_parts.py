# SPDX-License-Identifier: Apache-2.0
"""Adapters of the tower where ranks share images, and a first stage that is too short."""

import pytest
import torch

from megatron.bridge import AutoBridge
from megatron.bridge.checkpoint.model_io import unwrap
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.utils.errors import UserError
from tests.families.vision import harness

TARGETS = ["linear_proj", "vision.visual.blocks.*.qkv", "vision.visual.merger.mlp.*"]


def adapter_gradients(case, layout):
    """Name -> gradient of each factor, B beginning with random values."""
    bridge = AutoBridge.from_hf_pretrained(case.checkpoint)
    provider = bridge.to_megatron_provider()
    for name, value in harness.LAYOUTS[layout].items():
        setattr(provider, name, value)
    method = LoRA(
        target_modules=TARGETS, dim=4, lora_A_init_method="zero", lora_B_init_method="xavier"
    )
    provider.register_pre_wrap_hook(method)
    model = provider.provide_distributed_model()
    harness.forward_backward(model, case.samples(bridge.hf_config), case.row)
    with torch.no_grad():
        for parameter in unwrap(model[0]).parameters():
            if parameter.requires_grad:
                parameter.copy_(parameter.main_grad)
    return {
        name: value.clone()
        for name, value in bridge.export_adapter_weights(model, show_progress=False)
    }


@pytest.mark.parametrize("layout", ["tp2", "sp2", "cp2"])
def test_adapters_of_the_tower(two_workers, run_in_process, vision_case, layout):
    case = vision_case("qwen2_5_vl")
    alone = adapter_gradients(case, "one")
    found = two_workers.run(adapter_gradients, case, layout)[0]
    assert found.keys() == alone.keys()
    for name, value in alone.items():
        size = value.square().mean().sqrt().clamp(min=1e-6)
        assert (found[name] - value).abs().max() / size < 1e-3, name
    assert any("visual" in name and value.abs().max() > 0 for name, value in alone.items())


def refusal(case):
    """What building the model of this rank says."""
    provider = AutoBridge.from_hf_pretrained(case.checkpoint).to_megatron_provider(
        load_weights=False
    )
    provider.pipeline_model_parallel_size, provider.num_layers_in_first_pipeline_stage = 2, 1
    try:
        provider.provide_distributed_model(wrap_with_ddp=False)
    except UserError as error:
        return str(error)
    return ""


def test_features_behind_layers_of_another_stage(two_workers, vision_case):
    first, _ = two_workers.run(refusal, vision_case("qwen3_vl"))
    assert "num_layers_in_first_pipeline_stage=1" in first
    assert "at least 2 layers" in first
