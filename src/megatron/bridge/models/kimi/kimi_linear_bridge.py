# SPDX-License-Identifier: Apache-2.0
"""Kimi-Linear: Kimi delta attention in most layers, latent attention without positions in the others, experts."""

from dataclasses import replace

from megatron.bridge.models.families import (
    KIMI_DELTA,
    LATENT,
    LATENT_LIKE,
    NORM_SIGMOIDS,
    NOT_ROTATED,
    SCALING,
    SHARED_EXPERTS,
    SIGMOID_ROUTING,
    SPARSE_LAYERS,
    UNSPOKEN,
    DecoderBridge,
    MLAModelProvider,
    constant,
    ends,
    expert_sizes,
    experts,
    kimi_delta,
    latent_attention,
    mlp,
    override,
    register_bridge,
    router,
    shared_experts,
)

_MOE = "block_sparse_moe"
_LATENT = override(LATENT, *KIMI_DELTA, NOT_ROTATED)
_RENAMED = {"max_position_embeddings": "model_max_length"}


@register_bridge("KimiLinearForCausalLM", provider=MLAModelProvider, model_type="kimi_linear")
class KimiLinearBridge(DecoderBridge):
    fields = (
        *(
            replace(field, hf=_RENAMED.get(field.hf, field.hf))
            for field in _LATENT
            if field.hf != "rope_parameters"
        ),
        *expert_sizes("num_experts", chosen="num_experts_per_token", normalized="moe_renormalize"),
        SPARSE_LAYERS,
        SCALING,
        replace(SHARED_EXPERTS, hf="num_shared_experts"),
        replace(NORM_SIGMOIDS, hf="moe_renormalize"),
        constant("num_expert_group", 1),
        constant("topk_group", 1),
    )
    fixed = {**LATENT_LIKE, **SIGMOID_ROUTING, "position_embedding_type": "none"}
    irrelevant = {
        **UNSPOKEN,
        # transformers makes layer_types, mlp_layer_types and linear_... of them
        **dict.fromkeys(("linear_attn_config", "first_k_dense_replace")),
        **dict.fromkeys(("rope_theta", "rope_scaling", "rope_parameters")),  # nothing is rotated
        "num_nextn_predict_layers": (0,),
        "mla_use_nope": (True,),
        "moe_router_activation_func": ("sigmoid",),
        "use_grouped_topk": None,  # of one group
    }
    weights = (
        ends(),
        latent_attention(),
        kimi_delta(),
        mlp(names=_MOE),
        router(f"{_MOE}.gate"),
        experts(f"{_MOE}.experts.*", "w1", "w3", "w2"),
        shared_experts(f"{_MOE}.shared_experts"),
    )
