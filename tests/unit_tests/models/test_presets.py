# SPDX-License-Identifier: Apache-2.0
"""Bridges and providers under the names that other programs import."""

import dataclasses

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from megatron.bridge import models
from megatron.bridge.models.conversion import model_bridge
from megatron.bridge.utils.errors import UserError

WITHOUT_DEFAULTS = {
    "DeciModelProvider",
    "DeepseekV2ModelProvider",
    "Dots1ModelProvider",
    "Gemma4UnifiedVLModelProvider",
    "Gemma4VLModelProvider",
    "HunYuanMoEV1ModelProvider",
    "Lfm2MoeModelProvider",
    "MiMoModelProvider",
    "NemotronNanoVLModelProvider",
}
"""Families whose config class in transformers needs arguments, has no tower by default, or does not exist."""
SIZES = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 2}
SIZES |= {"ffn_hidden_size": 128, "vocab_size": 128, "seq_length": 64}


def test_a_family_exports_its_bridges():
    from megatron.bridge.models.llama import LlamaBridge
    from megatron.bridge.models.qwen import Qwen3Bridge, Qwen3VLBridge

    assert LlamaBridge is model_bridge.registration_of("LlamaForCausalLM").bridge
    assert Qwen3Bridge is not Qwen3VLBridge
    with pytest.raises(ImportError, match="Qwen99Bridge"):
        from megatron.bridge.models.qwen import Qwen99Bridge  # noqa: F401


@pytest.mark.parametrize(
    ("name", "model_type"),
    [
        ("LlamaModelProvider", "llama"),
        ("Qwen3ModelProvider", "qwen3"),
        ("Gemma2ModelProvider", "gemma2"),
    ],
)
def test_a_preset_is_what_the_family_reads_from_a_config(name, model_type):
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "head_dim": 16}
    sizes |= {"num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 128}
    architecture = f"{name.removesuffix('ModelProvider')}ForCausalLM"
    config = CONFIG_MAPPING[model_type](architectures=[architecture], **sizes)
    expected = model_bridge.bridge_for(config).provider_of(config.to_dict(), config.to_dict())
    lengths = {"max_position_embeddings": expected.max_position_embeddings}
    lengths["seq_length"] = expected.seq_length
    provider = getattr(models, name)(**{**SIZES, "kv_channels": 16, **lengths})
    assert type(provider) is type(expected)
    differing = {
        field.name: (getattr(provider, field.name), getattr(expected, field.name))
        for field in dataclasses.fields(expected)
        if getattr(provider, field.name) != getattr(expected, field.name)
        and not isinstance(getattr(expected, field.name), list | tuple | dict)
    }
    assert differing == {}


def has_preset(name):
    """Whether a preset makes a provider; one that cannot names another way."""
    try:
        getattr(models, name)(**SIZES)
    except UserError as error:
        if "AutoBridge.from_hf_config" not in str(error):
            raise
        return False
    return True


def test_every_family_has_a_preset_or_says_why_not():
    names = {
        f"{bridge.__name__.removesuffix('Bridge')}ModelProvider"
        for bridge in model_bridge.declared_bridges().values()
    }
    refused = {name for name in names if not has_preset(name)}
    refused.add(
        "MiMoModelProvider"
    )  # not refused where another test has registered its config class
    assert refused == WITHOUT_DEFAULTS


def test_an_unknown_preset_is_no_attribute():
    assert not hasattr(models, "NoSuchModelProvider")
    with pytest.raises(AttributeError, match="nothing"):
        models.nothing  # noqa: B018
