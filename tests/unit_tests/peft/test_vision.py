# SPDX-License-Identifier: Apache-2.0
"""LoRA on the decoder and on the vision tower: what ``peft`` computes with the same adapters, under its names."""

import re
import zlib

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.bridge import AutoBridge
from megatron.bridge.peft.hf_adapter import peft_for
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.utils.errors import UserError
from tests.families.own_models import model_class
from tests.families.vision import harness

TARGETS = {
    "qwen2_5_vl": ["linear_qkv", "vision.visual.blocks.*.qkv", "vision.visual.merger.mlp.0"],
    "qwen3_vl": ["linear_proj", "vision.visual.blocks.*.mlp.linear_fc1"],
    "qwen3_5_vl": ["linear_proj", "vision.visual.blocks.*.attn.proj"],
    "gemma4_vl": ["linear_qkv", "linear_fc2"],
    "gemma4_vl_small": [
        *("linear_qkv", "linear_proj", "vision.vision_tower.encoder.layers.*.q_proj.linear"),
        "vision.embed_vision.embedding_projection",
    ],
    "llava": [
        "linear_fc2",
        "vision.vision_tower.encoder.layers.0.*.q_proj",
        "vision.multi_modal_projector.*",
    ],
    "paligemma2": [
        "linear_qkv",
        "vision.vision_tower.encoder.layers.*.q_proj",
        "vision.multi_modal_projector.*",
    ],
    "nemotron_h_omni": [
        *("linear_qkv", "linear_fc2", "vision.vision_model.encoder.layer.*.mlp.fc1"),
        *("vision.vision_model.encoder.layer.*.qkv", "vision.multi_modal_projector.linear_1"),
    ],
    "smolvlm": ["linear_proj", "vision.vision_model.*.fc1"],
}


def adapted(case, method):
    bridge = AutoBridge.from_hf_pretrained(case.checkpoint)
    provider = bridge.to_megatron_provider()
    provider.register_pre_wrap_hook(method)
    return bridge, provider.provide_distributed_model()


def shake(directory):
    """Random factors in the place of those that begin at zero; projections that Megatron fuses share A."""
    path = directory / "adapter_model.safetensors"
    tensors = {}
    for name, value in load_file(path).items():
        seed = zlib.crc32(re.sub(r"\.[qkv]_proj\.lora_A", ".lora_A", name).encode())
        tensors[name] = 0.1 * torch.randn(
            value.shape, generator=torch.Generator().manual_seed(seed)
        )
    save_file(tensors, path, {"format": "pt"})


@pytest.mark.parametrize("name", TARGETS)
def test_it_computes_what_peft_computes(vision_case, tmp_path, name):
    case = vision_case(name)
    bridge, model = adapted(case, LoRA(target_modules=TARGETS[name], dim=4, alpha=8))
    bridge.save_hf_adapter(model, tmp_path / "adapter", show_progress=False)
    shake(tmp_path / "adapter")
    bridge.load_hf_adapter(model, tmp_path / "adapter")
    hf = model_class(case.row.model).from_pretrained(case.checkpoint, attn_implementation="eager")
    reference = peft.PeftModel.from_pretrained(hf, tmp_path / "adapter", is_trainable=True).eval()
    samples = case.samples(bridge.hf_config)
    expected = [harness.hf_logits(reference, sample, case.row) for sample in samples]
    for sample, logits in zip(samples, expected, strict=True):
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), sample.labels.flatten())
        (loss / len(samples)).backward()
    found = harness.forward_backward(model, samples, case.row)
    wanted = torch.cat(expected)
    assert (found[..., : wanted.shape[-1]] - wanted).abs().max() / wanted.std() < 1e-4
    compare_gradients(bridge, model, reference)


def compare_gradients(bridge, model, reference):
    with torch.no_grad():
        for parameter in model[0].parameters():
            if parameter.requires_grad:
                parameter.copy_(parameter.main_grad)
    gradients = {f"{name}": p.grad for name, p in reference.named_parameters() if p.requires_grad}
    found = dict(
        bridge.export_adapter_weights(model, show_progress=False, prefix="base_model.model.")
    )
    named = {name.replace(".default.", "."): value for name, value in gradients.items()}
    assert found.keys() == named.keys()
    for name, value in found.items():
        size = named[name].square().mean().sqrt().clamp(min=1e-6)
        if re.search(r"\.language_model\.|\.text_model\.|\.attention\..*lora_A", name):
            continue  # projections that Megatron fuses share A: see tests/unit_tests/peft/test_parity.py
        assert (value - named[name]).abs().max() / size < 1e-3, name


def test_an_adapter_of_peft_is_read(vision_case, tmp_path):
    case = vision_case("qwen2_5_vl")
    hf = model_class(case.row.model).from_pretrained(case.checkpoint, attn_implementation="eager")
    config = peft.LoraConfig(r=3, target_modules=["attn.qkv", "down_proj"], init_lora_weights=False)
    reference = peft.get_peft_model(hf, config).eval()
    reference.save_pretrained(tmp_path)
    bridge = AutoBridge.from_hf_pretrained(case.checkpoint)
    method = peft_for(bridge, tmp_path)
    model = bridge.to_megatron_model(wrap_with_ddp=False)
    method(model, training=False)
    bridge.load_hf_adapter(model, tmp_path)
    sample = case.samples(bridge.hf_config)[0]
    batch, media = harness.this_rank(sample, case.row)
    with torch.no_grad():
        expected = harness.hf_logits(reference, sample, case.row)
        found = model[0](
            input_ids=batch["ids"],
            position_ids=batch["positions"],
            attention_mask=None,
            media=media,
        )
    assert (found - expected).abs().max() / expected.std() < 1e-4


def test_the_default_leaves_the_tower_alone(vision_case):
    _, model = adapted(vision_case("qwen3_vl"), LoRA(dim=2))
    trained = [name for name, parameter in model[0].named_parameters() if parameter.requires_grad]
    assert trained
    assert not any("vision" in name for name in trained)


def test_a_target_that_the_tower_has_not(vision_case):
    with pytest.raises(UserError, match=r"vision\.visual\.blocks\.\*\.q_proj"):
        adapted(vision_case("qwen3_vl"), LoRA(target_modules=["vision.visual.blocks.*.q_proj"]))
