# SPDX-License-Identifier: Apache-2.0
"""Granite 3 and 4: multipliers of embeddings, attention scores, residuals and logits."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron.bridge.models.families import (
    ATTENTION_BIAS_OF_EXPERTS,
    AUX_LOSS,
    BIASES,
    DENSE,
    LLAMA_LIKE,
    MAMBA_LAYERS,
    ONE_GROUP,
    ONE_GROUP_MAMBA,
    SOFTMAX_ROUTING,
    DecoderBridge,
    Field,
    attention,
    ends,
    expert_sizes,
    mamba,
    mlp,
    named,
    optional,
    override,
    register_bridge,
    router,
    shared_experts,
    stacked_experts,
)


@register_bridge("GraniteForCausalLM", model_type="granite")
class GraniteBridge(DecoderBridge):
    """Granite 3: Llama with multipliers of embeddings, attention scores, residuals and logits."""

    fields = (
        *DENSE,
        *BIASES,
        Field("embedding_multiplier", "embedding_multiplier", default=1.0),
        Field("attention_multiplier", "softmax_scale", default=1.0),
        Field("residual_multiplier", "residual_multiplier", default=1.0),
        Field("logits_scaling", "logits_scaling", default=1.0),
    )
    fixed = LLAMA_LIKE
    weights = (ends(), attention(), mlp())


@register_bridge("GraniteMoeForCausalLM", model_type="granitemoe")
class GraniteMoeBridge(DecoderBridge):
    """Granite 3 with experts, 1B-A400M and 3B-A800M: Granite's multipliers, experts in every layer."""

    fields = (
        *(field for field in GraniteBridge.fields if field not in BIASES),
        *expert_sizes("num_local_experts", "intermediate_size"),
        ATTENTION_BIAS_OF_EXPERTS,
        AUX_LOSS,
    )
    fixed = {**LLAMA_LIKE, **SOFTMAX_ROUTING, "add_bias_linear": False}
    weights = (
        ends(),
        attention(),
        router("block_sparse_moe.router.layer", norm="post_attention_layernorm"),
        stacked_experts("block_sparse_moe", "input_linear.weight", "output_linear.weight"),
        shared_experts("shared_mlp", fused=("input_linear", "output_linear")),
    )


@register_bridge("GraniteMoeSharedForCausalLM", model_type="granitemoeshared")
class GraniteMoeSharedBridge(GraniteMoeBridge):
    fields = (
        *GraniteMoeBridge.fields,
        optional("shared_intermediate_size", "moe_shared_expert_intermediate_size"),
    )


_EXPERTS, _CHOSEN, _WIDTH = expert_sizes("num_local_experts", "intermediate_size")


def _expert_count(experts: int | None, config: Mapping[str, Any]) -> int | None:
    return _EXPERTS.to(experts, config) if experts and _EXPERTS.to else None


def _experts_per_token(_: int, config: Mapping[str, Any]) -> int:
    return (
        _CHOSEN.read(config)["moe_router_topk"] if config[_EXPERTS.hf] else 2
    )  # Megatron-Core's default


def _expert_width(width: int, config: Mapping[str, Any]) -> int | None:
    return width if config[_EXPERTS.hf] else None


def _shared_widths(width: int, config: Mapping[str, Any]) -> tuple[int, int | None]:
    """Width of the feed-forward layers; with experts, that of the shared expert."""
    return width, _expert_width(width, config)


_POSITIONS = {"rope": "rope", "nope": "none", None: "none"}


@register_bridge("GraniteMoeHybridForCausalLM", model_type="granitemoehybrid")
class GraniteMoeHybridBridge(GraniteMoeBridge):
    """Granite 4: Mamba-2 mixers instead of attention in most layers, with experts or without."""

    fields = (
        *override(
            GraniteMoeBridge.fields,
            replace(_EXPERTS, to=_expert_count, back=lambda count, _: count or 0),
            replace(
                _CHOSEN,
                to=_experts_per_token,
                back=lambda experts, provider: experts if provider.num_moe_experts else 0,
            ),
            replace(
                _WIDTH,
                to=_expert_width,
                back=lambda width, provider: width or provider.ffn_hidden_size,
            ),
            *ONE_GROUP_MAMBA,
            Field(
                "shared_intermediate_size",
                ("ffn_hidden_size", "moe_shared_expert_intermediate_size"),
                to=_shared_widths,
            ),
        ),
        named("position_embedding_type", "position_embedding_type", _POSITIONS, default=None),
        MAMBA_LAYERS,
    )
    fixed = {**GraniteMoeBridge.fixed, **ONE_GROUP}
    irrelevant = {
        **dict.fromkeys(("mamba_chunk_size", "init_method")),
        "normalization_function": ("rmsnorm",),
    }
    weights = (
        ends(),
        attention(),
        mamba("model.layers.*", "mamba", "input_layernorm", replaces_attention=True),
        mlp(names="shared_mlp", fused="input_linear", projections=("", "", "output_linear")),
        router("block_sparse_moe.router.layer"),
        stacked_experts("block_sparse_moe", "input_linear.weight", "output_linear.weight"),
        shared_experts("shared_mlp", fused=("input_linear", "output_linear")),
    )
