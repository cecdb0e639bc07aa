# SPDX-License-Identifier: Apache-2.0
"""GLM-4.5, 4.5-Air, 4.6 and 4.7: sigmoid routing, shared experts, dense layers first, multi-token prediction."""

from megatron.bridge.models.families import *

_LAYER = (attention(qk_norm=True), *DENSE_OR_SPARSE)


@register_bridge("Glm4MoeForCausalLM", model_type="glm4_moe")
class Glm4MoeBridge(DecoderBridge):
    fields = (
        *override(DENSE, PARTIAL_ROPE),
        *ROUTED_AND_SHARED,
        *GROUPS,
        NORM_SIGMOIDS,
        DENSE_BEFORE_SPARSE,
        NEXT_TOKENS,
        Field("attention_bias", "add_qkv_bias", default=False),
        Field("use_qk_norm", "qk_layernorm", default=False),
    )
    fixed = {**LLAMA_LIKE, **SIGMOID_ROUTING, "add_bias_linear": False}
    irrelevant = {"output_router_logits": None}
    weights = (ends(), *_LAYER, mtp(*_LAYER))
    copies = mtp_copies()
