# SPDX-License-Identifier: Apache-2.0
"""DeepSeek from V2 on: latent attention, experts in groups, dense layers first."""

from megatron.bridge.models.families import (
    BALANCING,
    BEST_GROUPS,
    DENSE_BEFORE_SPARSE,
    DENSE_OR_SPARSE,
    GROUPS,
    INDEXER,
    LATENT,
    LATENT_LIKE,
    NEXT_TOKENS,
    NORM_SIGMOIDS,
    ONLY_SIGMOIDS,
    PLAIN_SOFTMAX_ROUTING,
    ROUTED_AND_SHARED,
    SIGMOID_ROUTING,
    SPARSE_AFTER_DENSE,
    SPARSE_LIKE,
    UNSPOKEN,
    DecoderBridge,
    MLAModelProvider,
    ends,
    indexer,
    latent_attention,
    mtp,
    mtp_copies,
    register_bridge,
)

_LAYER = (latent_attention(), *DENSE_OR_SPARSE)
_INDEXED_LAYER = (latent_attention(), indexer(), *DENSE_OR_SPARSE)


@register_bridge("DeepseekV2ForCausalLM", provider=MLAModelProvider, model_type="deepseek_v2")
class DeepseekV2Bridge(DecoderBridge):
    """DeepSeek-V2 and V2-Lite: latent attention, softmax routing, experts in groups ranked by their best."""

    fields = (*LATENT, *ROUTED_AND_SHARED, *BEST_GROUPS, *BALANCING, DENSE_BEFORE_SPARSE)
    fixed = {**LATENT_LIKE, **PLAIN_SOFTMAX_ROUTING}
    # transformers never normalizes the weights of the chosen experts
    irrelevant = {**UNSPOKEN, "norm_topk_prob": (False, None), "scoring_func": ("softmax",)}
    weights = (ends(), *_LAYER)


@register_bridge("DeepseekV3ForCausalLM", provider=MLAModelProvider, model_type="deepseek_v3")
class DeepseekV3Bridge(DecoderBridge):
    """DeepSeek-V3, R1, Kimi K2 and Moonlight: latent attention, sigmoid routing, multi-token prediction."""

    fields = (
        *LATENT,
        *ROUTED_AND_SHARED,
        *GROUPS,
        NORM_SIGMOIDS,
        *BALANCING,
        DENSE_BEFORE_SPARSE,
        NEXT_TOKENS,
    )
    fixed = {**LATENT_LIKE, **SIGMOID_ROUTING}
    irrelevant = {**UNSPOKEN, **ONLY_SIGMOIDS}
    weights = (ends(), *_LAYER, mtp(*_LAYER))
    copies = mtp_copies()


@register_bridge("DeepseekV32ForCausalLM", provider=MLAModelProvider, model_type="deepseek_v32")
class DeepseekV32Bridge(DeepseekV3Bridge):
    """DeepSeek-V3.2: DeepSeek-V3 with sparse attention, whose keys an indexer chooses."""

    fields = (
        *LATENT,
        *INDEXER,
        *ROUTED_AND_SHARED,
        *GROUPS,
        *SPARSE_AFTER_DENSE,
        NORM_SIGMOIDS,
        NEXT_TOKENS,
    )
    fixed = {**SPARSE_LIKE, **SIGMOID_ROUTING}
    weights = (ends(), *_INDEXED_LAYER, mtp(*_INDEXED_LAYER))


DeepSeekV2Bridge, DeepSeekV3Bridge = DeepseekV2Bridge, DeepseekV3Bridge
