# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V3, R1, Kimi K2 and Moonlight: latent attention, sigmoid routing, multi-token prediction."""

from megatron.bridge.models.families import *

_LAYER = (latent_attention(), *DENSE_OR_SPARSE)


@register_bridge("DeepseekV3ForCausalLM", provider=MLAModelProvider, model_type="deepseek_v3")
class DeepseekV3Bridge(DecoderBridge):
    fields = (*LATENT, *ROUTED_AND_SHARED, *GROUPS, NORM_SIGMOIDS, *BALANCING, DENSE_BEFORE_SPARSE, NEXT_TOKENS)
    fixed = {**LATENT_LIKE, **SIGMOID_ROUTING}
    irrelevant = {**UNSPOKEN, **ONLY_SIGMOIDS}
    weights = (ends(), *_LAYER, mtp(*_LAYER))
    copies = mtp_copies()


DeepSeekV3Bridge = DeepseekV3Bridge
