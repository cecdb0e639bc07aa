# SPDX-License-Identifier: Apache-2.0
"""Configs of mixtures of experts: which layers have them, and what Megatron-Core's router cannot do."""

import pytest
import transformers

from megatron.bridge import AutoBridge
from megatron.bridge.backends.specs.layer_specs import moe_pattern
from megatron.bridge.models.conversion.model_bridge import bridge_for
from megatron.bridge.utils.errors import UserError

SMALL = {
    "num_hidden_layers": 6,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def config_of(model, **changes):
    config = getattr(transformers, model).config_class(**{**SMALL, **changes})
    config.architectures = [model]
    return config


def provider_of(model, **changes):
    return AutoBridge.from_hf_config(config_of(model, **changes)).to_megatron_provider(
        load_weights=False
    )


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({}, [1, 1, 1, 1, 1, 1]),
        ({"decoder_sparse_step": 2}, [0, 1, 0, 1, 0, 1]),
        ({"mlp_only_layers": [0, 4]}, [0, 1, 1, 1, 0, 1]),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, [0, 1, 0, 0, 0, 1]),
        ({"decoder_sparse_step": 3}, [0, 0, 1, 0, 0, 1]),
    ],
)
def test_dense_layers_by_step_and_exceptions(changes, pattern):
    provider = provider_of("Qwen3MoeForCausalLM", **changes)
    assert moe_pattern(provider) == pattern
    written = bridge_for(config_of("Qwen3MoeForCausalLM")).megatron_to_hf_config(provider)
    again = provider_of(
        "Qwen3MoeForCausalLM",
        **{key: written[key] for key in ("decoder_sparse_step", "mlp_only_layers")},
    )
    assert moe_pattern(again) == pattern
    assert all(written[key] == value for key, value in changes.items())


def test_experts_in_all_layers_are_not_tied_to_their_number():
    provider = provider_of("Qwen3MoeForCausalLM")
    provider.num_layers = 2
    assert moe_pattern(provider) == [1, 1]


@pytest.mark.parametrize("dense", [0, 1, 5])
def test_dense_layers_first(dense):
    provider = provider_of("Glm4MoeForCausalLM", first_k_dense_replace=dense)
    assert moe_pattern(provider) == [0] * dense + [1] * (6 - dense)
    written = bridge_for(config_of("Glm4MoeForCausalLM")).megatron_to_hf_config(provider)
    assert written["first_k_dense_replace"] == dense


def test_dense_layers_behind_sparse_ones_have_no_key():
    provider = provider_of("Glm4MoeForCausalLM")
    provider.moe_layer_freq = [1, 0, 1, 1, 1, 1]
    with pytest.raises(UserError, match="which first_k_dense_replace cannot express"):
        bridge_for(config_of("Glm4MoeForCausalLM")).megatron_to_hf_config(provider)


@pytest.mark.parametrize(
    ("experts", "groups", "chosen", "megatron"),
    [
        (8, 1, 1, (None, None, "sum")),
        (8, 8, 4, (8, 4, "sum")),
        (3, 4, 4, (4, 4, "sum")),
        (8, 8, 2, (8, 2, "two")),
        (3, 8, 2, (8, 2, "two")),
    ],
)
def test_groups(experts, groups, chosen, megatron):
    sizes = {"num_experts_per_tok": experts, "n_group": groups, "topk_group": chosen}
    provider = provider_of("Glm4MoeForCausalLM", **sizes)
    found = (
        provider.moe_router_num_groups,
        provider.moe_router_group_topk,
        provider.moe_router_group_score,
    )
    assert found == megatron
    written = bridge_for(config_of("Glm4MoeForCausalLM")).megatron_to_hf_config(provider)
    assert {key: written[key] for key in sizes} == sizes


@pytest.mark.parametrize("score", ["sum", "max"])
def test_another_rank_of_groups_has_no_key(score):
    provider = provider_of("Glm4MoeForCausalLM", num_experts_per_tok=8, n_group=8, topk_group=2)
    provider.moe_router_group_score = score
    with pytest.raises(UserError, match=f"moe_router_group_score='{score}' is not supported here"):
        bridge_for(config_of("Glm4MoeForCausalLM")).megatron_to_hf_config(provider)


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        (
            "Glm4MoeForCausalLM",
            {"n_group": 32, "topk_group": 1},
            "have 4 experts, fewer than num_experts_per_tok=8",
        ),
        (
            "Glm4MoeForCausalLM",
            {"num_experts_per_tok": 1},
            "num_experts_per_tok=1 with norm_topk_prob=True",
        ),
        ("Qwen3MoeForCausalLM", {"mlp_only_layers": [*range(6)]}, "leave no layer for experts"),
        (
            "Qwen3MoeForCausalLM",
            {"decoder_sparse_step": 7},
            "decoder_sparse_step=7 .* leave no layer for experts",
        ),
        (
            "Qwen3MoeForCausalLM",
            {"num_experts_per_tok": 0},
            "num_experts_per_tok=0 must be at least 1",
        ),
        (
            "Qwen3MoeForCausalLM",
            {"num_experts_per_tok": 129},
            "=129 is more than num_local_experts=128",
        ),
        ("Qwen3MoeForCausalLM", {"num_experts": 0}, "is more than num_local_experts=0"),
        (
            "MixtralForCausalLM",
            {"router_jitter_noise": 0.1},
            "router_jitter_noise=0.1 is not supported",
        ),
        ("MixtralForCausalLM", {"num_experts_per_tok": 1}, "num_experts_per_tok=1"),
    ],
)
def test_refused(model, changes, message):
    with pytest.raises(UserError, match=message):
        provider_of(model, **changes)
