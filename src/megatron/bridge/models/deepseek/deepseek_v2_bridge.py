# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V2 and V2-Lite: latent attention, softmax routing, experts in groups ranked by their best."""

from megatron.bridge.models.families import *


@register_bridge("DeepseekV2ForCausalLM", provider=MLAModelProvider, model_type="deepseek_v2")
class DeepseekV2Bridge(DecoderBridge):
    fields = (*LATENT, *ROUTED_AND_SHARED, *BEST_GROUPS, *BALANCING, DENSE_BEFORE_SPARSE)
    fixed = {**LATENT_LIKE, **PLAIN_SOFTMAX_ROUTING}
    # transformers never normalises the weights of the chosen experts
    irrelevant = {**UNSPOKEN, "norm_topk_prob": (False, None), "scoring_func": ("softmax",)}
    weights = (ends(), latent_attention(), *DENSE_OR_SPARSE)


DeepSeekV2Bridge = DeepseekV2Bridge
