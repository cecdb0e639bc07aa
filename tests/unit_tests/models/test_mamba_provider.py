# SPDX-License-Identifier: Apache-2.0
"""The provider of hybrid models: what it refuses, how its layers become stages, what it takes from configs."""

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from megatron.core.activations import squared_relu
from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.ssm.mlp_layer import MLPLayer
from safetensors.torch import load_file, save_file

from megatron.bridge import AutoBridge
from megatron.bridge.models import MambaModelProvider
from megatron.bridge.models.conversion.model_bridge import bridge_for
from megatron.bridge.utils.errors import UserError
from tests.families import harness, published
from tests.families.rows import ROWS

PATTERN = "hybrid_override_pattern"
PP, VP = "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"
PAIRS = {PP: 2, VP: 2, "overlap_p2p_comm": True, "batch_p2p_comm": False}


def toy(**changes):
    values = {
        "num_layers": 4,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "ffn_hidden_size": 48,
        "vocab_size": 101,
        "activation_func": squared_relu,
        "mamba_head_dim": 8,
        "mamba_num_groups": 2,
        "mamba_state_dim": 4,
        PATTERN: "M-*M",
    }
    return MambaModelProvider(**{**values, **changes})


REFUSED = {
    "no pattern": ({PATTERN: None}, "hybrid_override_pattern=None has no layers: give a symbol"),
    "unknown symbol": (
        {PATTERN: "M-*X"},
        "hybrid_override_pattern=M-*X has 'X': use only M Mamba, * attention, - feed-forward, E",
    ),
    "further predictions": ({PATTERN: "M-*M/MM"}, "hybrid_override_pattern=M-*M/MM has '/'"),
    "other length": ({"num_layers": 5}, "hybrid_override_pattern has 4 layers, num_layers=5"),
    "no experts": ({PATTERN: "M-*E"}, "1 layers of experts (E) but num_moe_experts=None"),
    "idle experts": ({"num_moe_experts": 4}, "0 layers of experts (E) but num_moe_experts=4"),
    "odd heads": ({"mamba_num_groups": 3}, "mamba_num_groups=3 does not divide mamba_num_heads=8"),
    "few groups": (
        {"tensor_model_parallel_size": 4},
        "tensor_model_parallel_size=4 does not divide mamba_num_gr",
    ),
    "context": ({"context_parallel_size": 3}, "context_parallel_size=3 cannot share out a tensor"),
    "placement": (
        {"norm_placement": "post"},
        "norm_placement='post' has no effect on a hybrid model",
    ),
    "predictions": ({"mtp_num_layers": 1}, "mtp_num_layers=1 has no effect on a hybrid model"),
    "uneven": ({PP: 3}, "3 pipeline stages do not divide num_layers=4: cut the layers with |"),
    "other stages": (
        {PP: 2, PATTERN: "M|-*|M"},
        "has 3 stages, pipeline_model_parallel_size x virtual_pip",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_refuses(name):
    changes, words = REFUSED[name]
    with pytest.raises(UserError) as refusal:
        toy(**changes).finalize()
    assert words in str(refusal.value)


@pytest.mark.parametrize(
    ("changes", "staged"),
    [
        ({}, "M-*M"),
        ({PP: 2}, "M-|*M"),
        (PAIRS, "M|-|*|M"),
        ({PP: 2, PATTERN: "M-*|M"}, "M-*|M"),
        ({**PAIRS, PATTERN: "M|-*||M"}, "M|-*||M"),
    ],
)
def test_stages(changes, staged):
    assert toy(**changes).resolved().staged_pattern() == staged


def test_layers_are_what_the_pattern_says():
    (chunk,) = toy().meta_model()
    kinds = [type(layer).__name__ for layer in chunk.decoder.layers]
    assert kinds == [
        MambaLayer.__name__,
        MLPLayer.__name__,
        "TransformerLayer",
        MambaLayer.__name__,
    ]


def test_nothing_derived_is_declared():
    provider = toy(num_moe_experts=4, moe_ffn_hidden_size=16, **{PATTERN: "ME*E"})
    assert provider.resolved().moe_layer_freq == [0, 1, 0, 1]
    assert provider.moe_layer_freq == 1


def test_checkpoint_keys_are_those_of_fused_norms():
    """Transformer Engine's layers hold the norms under these names, so one checkpoint serves both backends."""
    (chunk,) = toy().provide_distributed_model(wrap_with_ddp=False)
    keys = {shard.key for shard in chunk.sharded_state_dict().values() if hasattr(shard, "key")}
    for key in (
        "layers.0.mixer.in_proj.layer_norm_weight",
        "layers.1.mlp.linear_fc1.layer_norm_weight",
        "layers.2.self_attention.linear_qkv.layer_norm_weight",
        "layers.3.mixer.conv1d.weight",
        "final_norm.weight",
    ):
        assert f"decoder.{key}" in keys
    assert not any("_layernorm." in key or ".norm.layer" in key for key in keys)


@pytest.mark.parametrize("name", ["nemotron_h", "nemotron_h_experts"])
def test_converted_without_the_model_in_memory(family_case, tmp_path, name):
    case = family_case(name)
    AutoBridge.import_ckpt(case.checkpoint, tmp_path / "megatron", show_progress=False)
    bridge = AutoBridge.from_hf_pretrained(case.checkpoint)
    bridge.export_ckpt(tmp_path / "megatron", tmp_path / "hf", show_progress=False)
    assert harness.different_files(case, tmp_path / "hf") == []


# ---- configs ----------------------------------------------------------------------------------------------------


@pytest.fixture
def config(tmp_path):
    """config.json of a tiny model, to be written again with other keys."""
    harness.save(harness.hf_model(ROWS["nemotron_h_experts"]), tmp_path / "hf")
    found = json.loads((tmp_path / "hf" / "config.json").read_text())

    def read(**changes):
        changed = {key: value for key, value in {**found, **changes}.items() if value is not ...}
        (tmp_path / "hf" / "config.json").write_text(json.dumps(changed))
        return AutoBridge.from_hf_pretrained(tmp_path / "hf").to_megatron_provider(
            load_weights=False
        )

    return read


def test_layers_of_multi_token_prediction_are_carried(tmp_path):
    """Nemotron 3 Super has some; transformers ignores them, and an export has their bytes."""
    model = harness.hf_model(ROWS["nemotron_h_latent"])
    model.config.num_nextn_predict_layers = 1
    model.save_pretrained(tmp_path / "hf")
    weights, extra = (
        tmp_path / "hf" / "model.safetensors",
        {"mtp.layers.0.norm.weight": torch.arange(48.0)},
    )
    save_file({**load_file(weights), **extra}, weights, metadata={"format": "pt"})
    bridge = AutoBridge.from_hf_pretrained(tmp_path / "hf")
    bridge.save_hf_pretrained(bridge.to_megatron_model(wrap_with_ddp=False), tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == load_file(weights).keys()
    found = load_file(tmp_path / "out" / "model.safetensors")["mtp.layers.0.norm.weight"]
    assert torch.equal(found, extra["mtp.layers.0.norm.weight"])
    assert (
        json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 1
    )


@pytest.mark.parametrize(
    "spelling",
    [
        {"layers_block_type": ..., "hybrid_override_pattern": "ME*E", "num_hidden_layers": 4},
        {"layers_block_type": ["mamba", "moe", "attention", "moe"]},
        {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"]},
        {"time_step_limit": [0.0, math.inf], "head_dim": 16, "attention_head_dim": 16},
    ],
)
def test_spellings_of_the_hub(config, spelling):
    provider = config(**spelling)
    assert (provider.hybrid_override_pattern, provider.num_layers, provider.kv_channels) == (
        "ME*E",
        4,
        16,
    )


PUBLISHED = Path(published.__path__[0]) / "nvidia--Nemotron-H-8B-Base-8K.json"


def of_mapping(**changes):
    """The provider for what the config class that comes with a checkpoint says: older names, and no list."""
    found = {**json.loads(PUBLISHED.read_text()), **changes}
    config = SimpleNamespace(architectures=found["architectures"], to_dict=lambda: found)
    return bridge_for(config).provider_bridge(SimpleNamespace(config=config))


def test_a_config_of_remote_code():
    provider = of_mapping()
    assert provider.layer_kinds == json.loads(PUBLISHED.read_text())["hybrid_override_pattern"]
    assert provider.kv_channels == 128
    with pytest.raises(
        UserError, match="hybrid_override_pattern and layers_block_type name different layers"
    ):
        of_mapping(layers_block_type=["mamba"] * 52)
    with pytest.raises(UserError, match="num_hidden_layers=51 is not the 52 layers"):
        of_mapping(num_hidden_layers=51)
    with pytest.raises(UserError, match="head_dim is missing"):
        of_mapping(attention_head_dim=None)


WRONG = {
    "unknown kind": ({"layers_block_type": ["mamba", "moe", "conv", "moe"]}, "conv"),
    "widths": ({"attention_head_dim": 32}, "head_dim=16 and attention_head_dim=32 differ"),
    "biased experts": ({"mlp_bias": True}, "mlp_bias=True is not supported with layers of experts"),
    "tied": ({"tie_word_embeddings": True}, "tie_word_embeddings=True is not supported"),
    "activation": ({"mlp_hidden_act": "relu3"}, "mlp_hidden_act='relu3' is not supported"),
    "groups": ({"n_group": 4}, "n_group=4 does not divide n_routed_experts=6"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_configs(config, name):
    changes, words = WRONG[name]
    with pytest.raises(UserError) as refusal:
        config(**changes)
    assert words in str(refusal.value)


def test_dense_models_say_nothing_of_experts():
    config = harness.hf_model(ROWS["nemotron_h"]).config
    config.architectures = ["NemotronHForCausalLM"]
    dense = AutoBridge.from_hf_config(config)
    provider = dense.to_megatron_provider(load_weights=False)
    assert (provider.num_moe_experts, provider.moe_router_topk) == (
        None,
        MambaModelProvider.moe_router_topk,
    )
    written = dense._bridge.megatron_to_hf_config(provider)
    assert not {"n_routed_experts", "num_experts_per_tok", "n_group"} & set(written)


def test_lists_of_layers_in_config_json_that_differ_are_refused(family_case, tmp_path):
    """transformers reads layers_block_type and drops the other key before a bridge sees it."""
    folder = shutil.copytree(family_case("nemotron_h").checkpoint, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["hybrid_override_pattern"] = "M" * len(config["layers_block_type"])
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="hybrid_override_pattern and layers_block_type"):
        AutoBridge.from_hf_pretrained(folder).to_megatron_provider(load_weights=False)
