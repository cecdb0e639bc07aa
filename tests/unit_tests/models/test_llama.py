# SPDX-License-Identifier: Apache-2.0
"""The Llama family in one process: logits, gradients and every byte, against transformers' own model."""

import filecmp
import json

import pytest
import torch

from megatron.bridge import AutoBridge
from megatron.bridge.models.hf_pretrained.model_folder import RECORD
from megatron.bridge.utils.errors import UserError
from tests.toy_models import LLAMA3, LLAMA_VARIANTS, make_llama, tokens

# largest difference of the logits over their standard deviation, float32; gradients may be ten times that
TOLERANCE = 1e-4

FACTORS = [1.0, 1.1, 1.3, 1.7, 2.2, 3.0, 4.5, 7.0]
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 700.0},
    "linear": {"rope_type": "linear", "rope_theta": 700.0, "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 700.0, "factor": 2.5},
    "llama3": LLAMA3,
    "llama3_without_a_blend": LLAMA3 | {"high_freq_factor": LLAMA3["low_freq_factor"]},
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 700.0,
        "factor": 2.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 20.0,
        "beta_slow": 2.0,
    },
    "yarn_mscale": {
        "rope_type": "yarn",
        "rope_theta": 700.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "mscale": 0.8,
        "mscale_all_dim": 0.5,
        "truncate": False,
    },
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 700.0,
        "short_factor": FACTORS,
        "long_factor": [2 * factor for factor in FACTORS],
        "original_max_position_embeddings": 32,
    },
}


def bridged(directory):
    bridge = AutoBridge.from_hf_pretrained(directory)
    return bridge, bridge.to_megatron_model(wrap_with_ddp=False)


def difference(hf, chunk, ids, positions):
    """Largest difference of the logits over their standard deviation."""
    with torch.no_grad():
        expected = hf(input_ids=ids).logits
        found = chunk(input_ids=ids, position_ids=positions, attention_mask=None)
    return ((found[..., : expected.shape[-1]] - expected).abs().max() / expected.std()).item()


@pytest.mark.parametrize("variant", LLAMA_VARIANTS)
def test_logits_gradients_and_round_trip(variant, tmp_path):
    hf = make_llama(tmp_path / "hf", **LLAMA_VARIANTS[variant])
    bridge, model = bridged(tmp_path / "hf")
    ids, positions = tokens()
    assert difference(hf, model[0], ids, positions) <= TOLERANCE

    hf(input_ids=ids).logits.square().mean().backward()
    model[0](input_ids=ids, position_ids=positions, attention_mask=None).square().mean().backward()
    reference = {name: parameter.grad for name, parameter in hf.named_parameters()}
    with torch.no_grad():
        for parameter in model[0].parameters():
            parameter.copy_(parameter.grad)
    for name, gradient in bridge.export_hf_weights(model, show_progress=False):
        error = (gradient - reference[name]).abs().max() / reference[name].std()
        assert error <= 10 * TOLERANCE, f"{name}: {error}"

    bridge.load_hf_weights(model)
    bridge.save_hf_pretrained(model, tmp_path / "out", show_progress=False)
    assert_same_files(tmp_path / "hf", tmp_path / "out")


def assert_same_files(source, exported):
    names = sorted(str(path.relative_to(source)) for path in source.rglob("*"))
    assert sorted([*names, RECORD]) == sorted(
        str(path.relative_to(exported)) for path in exported.rglob("*")
    )
    different = [
        name for name in names if not filecmp.cmp(source / name, exported / name, shallow=False)
    ]
    assert not different


@pytest.mark.parametrize("length", [20, 50, 90])
@pytest.mark.parametrize("rope", ROPES)
def test_every_rope_scaling(rope, length, tmp_path):
    hf = make_llama(tmp_path, num_hidden_layers=2, rope_parameters=ROPES[rope])
    _, model = bridged(tmp_path)
    assert difference(hf, model[0], *tokens(length=length)) <= TOLERANCE


def test_old_style_config(tmp_path):
    from transformers import AutoModelForCausalLM

    make_llama(tmp_path / "hf", dtype=torch.bfloat16, rope_parameters=LLAMA3)
    path = tmp_path / "hf" / "config.json"
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = rope
    config["torch_dtype"] = config.pop("dtype")
    path.write_text(json.dumps(config))

    bridge, model = bridged(tmp_path / "hf")

    provider = bridge.to_megatron_provider(load_weights=False)
    assert (provider.params_dtype, provider.bf16) == (torch.bfloat16, True)
    assert (provider.rotary_base, provider.rope_parameters["low_freq_factor"]) == (500.0, 1.5)
    bridge.save_hf_pretrained(model, tmp_path / "out", show_progress=False)
    assert_same_files(tmp_path / "hf", tmp_path / "out")
    hf = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    wide = AutoBridge.from_hf_pretrained(tmp_path / "hf", torch_dtype=torch.float32)
    assert difference(hf, wide.to_megatron_model(wrap_with_ddp=False)[0], *tokens()) <= TOLERANCE


def test_another_dtype_than_the_checkpoints(tmp_path):
    from transformers import AutoModelForCausalLM

    make_llama(tmp_path / "hf", dtype=torch.bfloat16)
    hf = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    bridge = AutoBridge.from_hf_pretrained(tmp_path / "hf", dtype=torch.float32)
    model = bridge.to_megatron_model(wrap_with_ddp=False)
    assert difference(hf, model[0], *tokens()) <= TOLERANCE
    bridge.save_hf_pretrained(model, tmp_path / "out", show_progress=False)
    assert_same_files(tmp_path / "hf", tmp_path / "out")


def test_a_config_that_does_not_say_its_dtype(tmp_path):
    make_llama(tmp_path, dtype=torch.bfloat16, num_hidden_layers=1)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["dtype"]
    path.write_text(json.dumps(config))
    provider = AutoBridge.from_hf_pretrained(tmp_path).to_megatron_provider(load_weights=False)
    assert (provider.params_dtype, provider.bf16) == (torch.bfloat16, True)


def test_stored_copy_of_a_tied_head_is_restored(tmp_path):
    from safetensors.torch import load_file, save_file

    make_llama(tmp_path / "hf", tie_word_embeddings=True, shard_size="1GB")
    path = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.randn(8)
    save_file(tensors, path, metadata={"format": "pt"})
    bridge, model = bridged(tmp_path / "hf")
    assert "lm_head.weight = model.embed_tokens.weight (tied)" in str(bridge.plan(model))
    bridge.save_hf_pretrained(model, tmp_path / "out", show_progress=False)
    assert_same_files(tmp_path / "hf", tmp_path / "out")


def test_config_round_trip_of_published_sizes():
    from transformers import LlamaConfig

    sizes = [
        {
            "hidden_size": 2048,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "rope_parameters": LLAMA3,
        },
        {
            "hidden_size": 576,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "tie_word_embeddings": True,
        },
        {
            "hidden_size": 16384,
            "num_attention_heads": 128,
            "num_key_value_heads": 8,
            "dtype": "bfloat16",
        },
    ]
    for size in sizes:
        config = LlamaConfig(architectures=["LlamaForCausalLM"], **size)
        bridge = AutoBridge.from_hf_config(config)
        provider = bridge.to_megatron_provider(load_weights=False)
        rebuilt = LlamaConfig(**bridge._bridge.megatron_to_hf_config(provider)).to_dict()
        wanted = {**config.to_dict(), "dtype": config.to_dict()["dtype"] or "float32"}
        assert {key: rebuilt[key] for key in wanted} == wanted


def test_exported_config_follows_what_was_changed(tmp_path):
    make_llama(tmp_path / "hf", num_hidden_layers=1)
    bridge = AutoBridge.from_hf_pretrained(tmp_path / "hf")
    provider = bridge.to_megatron_provider()
    provider.rotary_base, provider.seq_length = 9000.0, 17
    bridge.save_hf_pretrained(
        provider.provide_distributed_model(wrap_with_ddp=False),
        tmp_path / "out",
        show_progress=False,
    )
    before, after = (
        json.loads((tmp_path / name / "config.json").read_text()) for name in ("hf", "out")
    )
    assert after.pop("rope_parameters")["rope_theta"] == 9000.0
    before.pop("rope_parameters")
    assert after == before


def test_a_config_without_weights(tmp_path):
    from transformers import AutoModelForCausalLM, LlamaConfig

    from tests.toy_models import LLAMA

    bridge = AutoBridge.from_hf_config(LlamaConfig(**LLAMA, architectures=["LlamaForCausalLM"]))
    with pytest.raises(UserError, match="this bridge has a config and no weights"):
        bridge.to_megatron_provider()
    model = bridge.to_megatron_model(load_weights=False, wrap_with_ddp=False)
    bridge.save_hf_pretrained(model, tmp_path / "out", show_progress=False)
    hf = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert difference(hf, model[0], *tokens()) <= TOLERANCE


def test_rope_settings_that_would_have_no_effect_are_refused(tmp_path):
    make_llama(tmp_path, num_hidden_layers=1, rope_parameters=ROPES["yarn"])
    provider = AutoBridge.from_hf_pretrained(tmp_path).to_megatron_provider()
    provider.rope_scaling = True
    with pytest.raises(UserError, match="rope_type='yarn' has no effect with"):
        provider.provide_distributed_model(wrap_with_ddp=False)
