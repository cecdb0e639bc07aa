# SPDX-License-Identifier: Apache-2.0
"""What ``model.qat`` trains is what an export stores, and what cannot be stored is refused by name."""

import copy
import json
from types import SimpleNamespace

import pytest
import torch

from megatron.bridge import AutoBridge
from megatron.bridge.backends.low_bit import rounded_layers
from megatron.bridge.inference import loading
from megatron.bridge.models import GPTModelProvider
from megatron.bridge.models.features import quantization_aware
from megatron.bridge.models.features.quantization_aware import (
    QuantizationAwareFeature,
    is_rounded,
    linear_layers,
    unused_patterns,
)
from megatron.bridge.recipes.sizes import HFConfigDict
from megatron.bridge.training.initialize.rounding import check_rounded_layers
from megatron.bridge.utils.errors import UserError
from tests.toy_run import save_llama

GROUPS = {"fp8-block": 8, "int4": 16, "int4-awq": 16}
TOKENS = torch.arange(16)[None]


@pytest.fixture
def source(tmp_path):
    return save_llama(tmp_path / "hf")


def trained_model(source, name, **settings):
    """A model as a run trains it."""
    bridge = AutoBridge.from_hf_pretrained(source)
    provider = bridge.to_megatron_provider()
    provider.backend = "torch"
    provider.qat, provider.qat_inputs = name, False
    provider.qat_group_size = GROUPS.get(name)
    for setting, value in settings.items():
        setattr(provider, setting, value)
    return bridge, provider.provide_distributed_model(wrap_with_ddp=False)


@torch.no_grad()
def logits(chunks):
    return chunks[0](input_ids=TOKENS, position_ids=TOKENS, attention_mask=None)


@pytest.mark.parametrize("name", ["int8", "fp8-block", "int4", "nvfp4", "fp8-tensor"])
def test_the_export_has_the_weights_of_training(source, tmp_path, name):
    from transformers import AutoModelForCausalLM

    bridge, chunks = trained_model(source, name, qat_keep_high=["layers.0.mlp.linear_fc2"])
    expected = logits(chunks)
    bridge.save_hf_pretrained(chunks, tmp_path / "out", show_progress=False, quantize="trained")
    quantized = AutoBridge.from_hf_pretrained(tmp_path / "out")
    in_full = quantized.to_megatron_model(wrap_with_ddp=False)
    quantized.save_hf_pretrained(in_full, tmp_path / "full", show_progress=False)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "full", dtype=torch.float32)
    with torch.no_grad():
        found = loaded(TOKENS).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))

    full = dict(bridge.export_hf_weights(chunks, show_progress=False))
    read = quantized.hf_pretrained.state
    changed = {key for key, weight in full.items() if not torch.equal(read[key], weight)}
    matrices = {key for key in full if "_proj" in key}
    assert changed == matrices - {"model.layers.0.mlp.down_proj.weight"}
    for weight in quantization_aware.rounded_parameters(chunks[0]):
        assert "layers.0.mlp.linear_fc2" not in weight[0]


def test_generation_uses_the_weights_of_training(source, tmp_path):
    bridge, chunks = trained_model(source, "int8")
    expected = logits(chunks)
    bridge.save_megatron_model(chunks, tmp_path / "megatron")
    loaded = loading.load(tmp_path / "megatron", sizes={})
    assert rounded_layers.settings_of(loaded.chunks[0].decoder.layers[0].mlp.linear_fc1) is None
    assert torch.equal(logits(loaded.chunks), expected)


def test_an_export_in_another_format_says_so(source, tmp_path, capsys):
    bridge, chunks = trained_model(source, "int8")
    bridge.save_hf_pretrained(chunks, tmp_path / "out", show_progress=False, quantize="mxfp8")
    assert "--quantize trained" in capsys.readouterr().err


def test_trained_needs_a_model_that_was(source, tmp_path):
    bridge = AutoBridge.from_hf_pretrained(source)
    chunks = bridge.to_megatron_model(wrap_with_ddp=False)
    with pytest.raises(UserError, match=r"quantize='trained'.*model\.qat"):
        bridge.save_hf_pretrained(chunks, tmp_path / "out", show_progress=False, quantize="trained")
    assert not (tmp_path / "out").exists()


def provider(**settings):
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 96}
    return GPTModelProvider(**{**sizes, "backend": "torch", **settings})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"qat": "int8", "qat_group_size": 32}, r"qat_group_size=32.*qat='int8'.*leave it out"),
        ({"qat": "int4", "qat_group_size": 24}, r"qat='int4'.*24 neighbors.*32 columns"),
        ({"qat": "fp8-block", "qat_group_size": 12}, r"12 neighbors.*rows.*qat_keep_high"),
        ({"qat": "int8", "delay_wgrad_compute": True}, "delay_wgrad_compute=True"),
    ],
)
def test_what_cannot_be_rounded_is_refused(settings, message):
    with pytest.raises(UserError, match=message):
        provider(**settings).provide_distributed_model(wrap_with_ddp=False)


def test_layers_of_transformer_engine_are_refused():
    model = provider(qat="int8", backend="transformer_engine")
    (problem,) = QuantizationAwareFeature().check(model)
    assert "qat='int8'" in problem
    assert "backend='transformer_engine'" in problem
    assert "model.backend=torch" in problem


def test_a_pattern_that_keeps_nothing_is_refused():
    model = provider(qat="int8", qat_keep_high=["linear_proj", "liner_fc1"])
    chunks = model.provide_distributed_model(wrap_with_ddp=False)
    with pytest.raises(UserError, match=r"qat_keep_high='liner_fc1'"):
        check_rounded_layers(SimpleNamespace(model=model), chunks)


def test_experts_that_are_published_in_one_tensor_are_refused(family_case):
    """gpt-oss stores its experts in MXFP4, and nothing else."""
    case = family_case("gpt_oss")
    kept = ["linear_qkv", "linear_proj"]
    for name, keep, message in (
        ("int8", kept, "experts"),
        ("mxfp4", [], "linear_qkv|linear_proj"),
        ("mxfp4", kept, None),
    ):
        _, chunks = trained_model(case.checkpoint, name, qat_keep_high=keep)
        config = SimpleNamespace(model=chunks[0].config)
        if message is None:
            check_rounded_layers(config, chunks)
            continue
        with pytest.raises(UserError, match=rf"qat='{name}'.*({message}).*qat_keep_high"):
            check_rounded_layers(config, chunks)


def test_the_model_of_a_recipe_has_its_config_as_a_dictionary(source):
    _, chunks = trained_model(source, "int8")
    model = copy.copy(chunks[0].config)
    model.hf_config = HFConfigDict(json.loads((source / "config.json").read_text()))
    check_rounded_layers(SimpleNamespace(model=model), chunks)


def test_a_language_model_inside_another_has_the_same_layers(source):
    """Vision-language models have it as ``language_model``."""
    _, chunks = trained_model(source, "int8", qat_keep_high=["layers.0.mlp.*"])
    inside = torch.nn.ModuleDict({"language_model": chunks[0]})
    alone = [f"language_model.{name}" for name, _ in linear_layers(chunks[0])]
    assert [name for name, _ in linear_layers(inside)] == alone
    assert unused_patterns([inside], ["layers.0.mlp.*", "decoder.layers.1.*"]) == []
    model = chunks[0].config
    assert is_rounded("language_model.decoder.layers.1.mlp.linear_fc1.weight", model)
    assert not is_rounded("language_model.decoder.layers.0.mlp.linear_fc1.weight", model)


def test_a_vision_language_model_is_trained_for_a_format(vision_case, tmp_path):
    case = vision_case("qwen2_5_vl")
    bridge, chunks = trained_model(case.checkpoint, "int8", qat_keep_high=["layers.0.mlp.*"])
    check_rounded_layers(SimpleNamespace(model=chunks[0].config), chunks)
    bridge.save_hf_pretrained(chunks, tmp_path / "out", show_progress=False, quantize="trained")
    quantized = set(AutoBridge.from_hf_pretrained(tmp_path / "out").hf_pretrained.state.packed)
    assert "model.layers.0.self_attn.q_proj.weight" in quantized
    assert "model.layers.1.mlp.up_proj.weight" in quantized
    assert not any("layers.0.mlp" in name or "visual" in name for name in quantized)


def test_names_of_experts_and_kept_layers():
    model = provider(qat="int8", qat_keep_high=["layers.1.*"])
    expert = "decoder.layers.0.mlp.experts.linear_fc1.weight3"
    assert is_rounded(expert, model)
    assert is_rounded("decoder.layers.0.mlp.experts.local_experts.2.linear_fc2.weight", model)
    assert not is_rounded(expert.replace("layers.0", "layers.1"), model)
    assert not is_rounded("decoder.layers.0.mlp.router.weight", model)
    assert not is_rounded("output_layer.weight", model)
    assert not is_rounded(expert, provider())
