# SPDX-License-Identifier: Apache-2.0
"""GLM-4.5, 4.5-Air, 4.6 and 4.7: sigmoid routing, shared experts, dense layers first, multi-token prediction."""

from megatron.bridge.models.conversion.declare.blocks import attention, ends, mlp
from megatron.bridge.models.conversion.declare.decoder_fields import DENSE, LLAMA_LIKE, PARTIAL_ROPE
from megatron.bridge.models.conversion.declare.fields import Field, override
from megatron.bridge.models.conversion.declare.mla_blocks import mtp, mtp_copies
from megatron.bridge.models.conversion.declare.mla_fields import NEXT_TOKENS
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

_LAYER = (attention(qk_norm=True), mlp(), router(), experts(), shared_experts())


@register_bridge("Glm4MoeForCausalLM", model_type="glm4_moe")
class Glm4MoeBridge(DecoderBridge):
    """Hugging Face's ``Glm4MoeForCausalLM`` and Megatron's ``GPTModel``."""

    fields = (
        *override(DENSE, PARTIAL_ROPE),
        *expert_sizes("n_routed_experts"),
        *GROUPS,
        DENSE_BEFORE_SPARSE,
        SHARED_EXPERTS,
        SCALING,
        NEXT_TOKENS,
        Field("attention_bias", "add_qkv_bias", default=False),
        Field("use_qk_norm", "qk_layernorm", default=False),
    )
    fixed = {**LLAMA_LIKE, **SIGMOID_ROUTING, "add_bias_linear": False}
    irrelevant = {"norm_topk_prob": (True,), "output_router_logits": None}
    weights = (ends(), *_LAYER, mtp(*_LAYER))
    copies = mtp_copies()
