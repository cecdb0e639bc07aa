# SPDX-License-Identifier: Apache-2.0
"""Kimi-Linear: Kimi delta attention in most layers, latent attention without positions in the others, experts."""

from dataclasses import replace

from megatron.bridge.models.conversion.declare import mla_fields as mla
from megatron.bridge.models.conversion.declare import moe_fields as moe
from megatron.bridge.models.conversion.declare.blocks import ends, mlp
from megatron.bridge.models.conversion.declare.fields import constant, override
from megatron.bridge.models.conversion.declare.kimi_delta import KIMI_DELTA, kimi_delta
from megatron.bridge.models.conversion.declare.mla_blocks import latent_attention
from megatron.bridge.models.conversion.declare.moe_blocks import experts, router, shared_experts
from megatron.bridge.models.conversion.model_bridge import DecoderBridge, register_bridge
from megatron.bridge.models.mla_provider import MLAModelProvider

_MOE = "block_sparse_moe"
_LATENT = override(mla.LATENT, *KIMI_DELTA, mla.NOT_ROTATED)
_RENAMED = {"max_position_embeddings": "model_max_length"}


@register_bridge("KimiLinearForCausalLM", provider=MLAModelProvider, model_type="kimi_linear")
class KimiLinearBridge(DecoderBridge):
    fields = (
        *(replace(field, hf=_RENAMED.get(field.hf, field.hf)) for field in _LATENT if field.hf != "rope_parameters"),
        *moe.expert_sizes("num_experts", chosen="num_experts_per_token", normalised="moe_renormalize"),
        *(mla.SPARSE_LAYERS, moe.SCALING, replace(moe.SHARED_EXPERTS, hf="num_shared_experts")),
        replace(moe.NORM_SIGMOIDS, hf="moe_renormalize"),
        *(constant("num_expert_group", 1), constant("topk_group", 1)),
    )
    fixed = {**mla.LATENT_LIKE, **moe.SIGMOID_ROUTING, "position_embedding_type": "none"}
    irrelevant = {
        **mla.UNSPOKEN,
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
