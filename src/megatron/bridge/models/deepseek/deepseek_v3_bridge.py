# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V3, R1, Kimi K2 and Moonlight: latent attention, sigmoid routing, multi-token prediction."""

from megatron.bridge.models.conversion.declare import mla_fields as mla
from megatron.bridge.models.conversion.declare import moe_fields as moe
from megatron.bridge.models.conversion.declare.blocks import ends
from megatron.bridge.models.conversion.declare.mla_blocks import latent_attention, mtp, mtp_copies
from megatron.bridge.models.conversion.declare.moe_blocks import DENSE_OR_SPARSE
from megatron.bridge.models.conversion.model_bridge import DecoderBridge, register_bridge
from megatron.bridge.models.mla_provider import MLAModelProvider

_LAYER = (latent_attention(), *DENSE_OR_SPARSE)


@register_bridge("DeepseekV3ForCausalLM", provider=MLAModelProvider, model_type="deepseek_v3")
class DeepseekV3Bridge(DecoderBridge):
    fields = (
        *mla.LATENT,
        *moe.ROUTED_AND_SHARED,
        *moe.GROUPS,
        moe.NORM_SIGMOIDS,
        *mla.BALANCING,
        moe.DENSE_BEFORE_SPARSE,
        mla.NEXT_TOKENS,
    )
    fixed = {**mla.LATENT_LIKE, **moe.SIGMOID_ROUTING}
    irrelevant = {**mla.UNSPOKEN, **mla.ONLY_SIGMOIDS}
    weights = (ends(), *_LAYER, mtp(*_LAYER))
    copies = mtp_copies()


DeepSeekV3Bridge = DeepseekV3Bridge
