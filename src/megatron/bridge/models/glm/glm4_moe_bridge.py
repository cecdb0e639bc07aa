# SPDX-License-Identifier: Apache-2.0
"""GLM-4.5, 4.5-Air, 4.6 and 4.7: sigmoid routing, shared experts, dense layers first, multi-token prediction."""

from megatron.bridge.models.conversion.declare import mla_fields as mla
from megatron.bridge.models.conversion.declare import moe_fields as moe
from megatron.bridge.models.conversion.declare.blocks import attention, ends
from megatron.bridge.models.conversion.declare.decoder_fields import DENSE, LLAMA_LIKE, PARTIAL_ROPE
from megatron.bridge.models.conversion.declare.fields import Field, override
from megatron.bridge.models.conversion.declare.mla_blocks import mtp, mtp_copies
from megatron.bridge.models.conversion.declare.moe_blocks import DENSE_OR_SPARSE
from megatron.bridge.models.conversion.model_bridge import DecoderBridge, register_bridge

_LAYER = (attention(qk_norm=True), *DENSE_OR_SPARSE)


@register_bridge("Glm4MoeForCausalLM", model_type="glm4_moe")
class Glm4MoeBridge(DecoderBridge):
    fields = (
        *override(DENSE, PARTIAL_ROPE),
        *moe.ROUTED_AND_SHARED,
        *moe.GROUPS,
        moe.NORM_SIGMOIDS,
        moe.DENSE_BEFORE_SPARSE,
        mla.NEXT_TOKENS,
        Field("attention_bias", "add_qkv_bias", default=False),
        Field("use_qk_norm", "qk_layernorm", default=False),
    )
    fixed = {**LLAMA_LIKE, **moe.SIGMOID_ROUTING, "add_bias_linear": False}
    irrelevant = {"output_router_logits": None}
    weights = (ends(), *_LAYER, mtp(*_LAYER))
    copies = mtp_copies()
