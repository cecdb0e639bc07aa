# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V2 and V2-Lite: latent attention, softmax routing, experts in groups ranked by their best."""

from megatron.bridge.models.conversion.declare import mla_fields as mla
from megatron.bridge.models.conversion.declare import moe_fields as moe
from megatron.bridge.models.conversion.declare.blocks import ends
from megatron.bridge.models.conversion.declare.mla_blocks import latent_attention
from megatron.bridge.models.conversion.declare.moe_blocks import DENSE_OR_SPARSE
from megatron.bridge.models.conversion.model_bridge import DecoderBridge, register_bridge
from megatron.bridge.models.mla_provider import MLAModelProvider


@register_bridge("DeepseekV2ForCausalLM", provider=MLAModelProvider, model_type="deepseek_v2")
class DeepseekV2Bridge(DecoderBridge):
    fields = (*mla.LATENT, *moe.ROUTED_AND_SHARED, *mla.BEST_GROUPS, *mla.BALANCING, moe.DENSE_BEFORE_SPARSE)
    fixed = {**mla.LATENT_LIKE, **mla.PLAIN_SOFTMAX_ROUTING}
    # transformers never normalises the weights of the chosen experts
    irrelevant = {**mla.UNSPOKEN, "norm_topk_prob": (False, None), "scoring_func": ("softmax",)}
    weights = (ends(), latent_attention(), *DENSE_OR_SPARSE)


DeepSeekV2Bridge = DeepseekV2Bridge
