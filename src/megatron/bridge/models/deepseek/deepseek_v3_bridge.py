# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V3, R1, Kimi K2 and Moonlight: latent attention, sigmoid routing, multi-token prediction."""

from megatron.bridge.models.conversion.declare.blocks import ends, mlp
from megatron.bridge.models.conversion.declare.mla_blocks import latent_attention, mtp, mtp_copies
from megatron.bridge.models.conversion.declare.mla_fields import (
    BALANCING,
    LATENT,
    LATENT_LIKE,
    NEXT_TOKENS,
    UNSPOKEN,
)
from megatron.bridge.models.conversion.declare.moe_blocks import experts, router, shared_experts
from megatron.bridge.models.conversion.declare.moe_fields import (
    DENSE_BEFORE_SPARSE,
    GROUPS,
    SCALING,
    SHARED_EXPERTS,
    SIGMOID_ROUTING,
    expert_sizes,
)
from megatron.bridge.models.conversion.model_bridge import DecoderBridge, register_bridge
from megatron.bridge.models.mla_provider import MLAModelProvider

_LAYER = (latent_attention(), mlp(), router(), experts(), shared_experts())


@register_bridge("DeepseekV3ForCausalLM", provider=MLAModelProvider, model_type="deepseek_v3")
class DeepseekV3Bridge(DecoderBridge):
    """Hugging Face's ``DeepseekV3ForCausalLM`` and Megatron's ``GPTModel``."""

    fields = (
        *LATENT,
        *expert_sizes("n_routed_experts"),
        *GROUPS,
        *BALANCING,
        DENSE_BEFORE_SPARSE,
        SHARED_EXPERTS,
        SCALING,
        NEXT_TOKENS,
    )
    fixed = {**LATENT_LIKE, **SIGMOID_ROUTING}
    irrelevant = {
        **UNSPOKEN,
        "norm_topk_prob": (True,),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
    }
    weights = (ends(), *_LAYER, mtp(*_LAYER))
    copies = mtp_copies()
