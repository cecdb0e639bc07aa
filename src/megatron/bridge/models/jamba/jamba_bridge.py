# SPDX-License-Identifier: Apache-2.0
"""Jamba: Mamba-1 mixers instead of attention in most layers, no positions, experts in every other layer."""

from megatron.bridge.models.families import (
    AUX_LOSS,
    DENSE,
    LLAMA_LIKE,
    ONE_GROUP,
    PERIODIC_EXPERTS,
    SELECTIVE_MAMBA,
    SOFTMAX_ROUTING,
    DecoderBridge,
    Field,
    attention,
    ends,
    experts,
    mlp,
    override,
    register_bridge,
    router,
    selective_mamba,
)

_SIZES = (
    *SELECTIVE_MAMBA,
    *PERIODIC_EXPERTS,
    Field(
        "intermediate_size",
        ("ffn_hidden_size", "moe_ffn_hidden_size"),
        to=lambda width, config: (width, width if config["num_experts"] > 1 else None),
    ),
    Field(
        "num_experts",
        "num_moe_experts",
        to=lambda n, _: n if n > 1 else None,
        back=lambda n, _: n or 1,
    ),
    Field("num_experts_per_tok", "moe_router_topk"),
    AUX_LOSS,
)


@register_bridge("JambaForCausalLM", model_type="jamba")
class JambaBridge(DecoderBridge):
    fields = tuple(field for field in override(DENSE, *_SIZES) if field.hf != "rope_parameters")
    fixed = {
        **LLAMA_LIKE,
        **SOFTMAX_ROUTING,
        **ONE_GROUP,
        "position_embedding_type": "none",
        "add_bias_linear": False,
        "moe_router_pre_softmax": True,
    }
    irrelevant = dict.fromkeys(
        ("use_mamba_kernels", "use_mambapy", "use_associative_scan", "num_logits_to_keep")
    )
    irrelevant |= {"sliding_window": (None,)}
    weights = (
        ends(norm="model.final_layernorm"),
        attention(),
        selective_mamba(),
        mlp(norm="pre_ff_layernorm", names="feed_forward"),
        router("feed_forward.router"),
        experts("feed_forward.experts.*"),
    )
