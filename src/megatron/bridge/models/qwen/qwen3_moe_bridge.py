# SPDX-License-Identifier: Apache-2.0
"""Qwen3-30B-A3B, Qwen3-235B-A22B and Qwen3-Coder: normalised queries and keys, dense layers among the sparse."""

from megatron.bridge.models.conversion.declare import moe_fields as moe
from megatron.bridge.models.conversion.declare.blocks import attention, ends, mlp
from megatron.bridge.models.conversion.declare.decoder_fields import DENSE, LLAMA_LIKE, SWITCHED_WINDOWS
from megatron.bridge.models.conversion.declare.moe_blocks import experts, router
from megatron.bridge.models.conversion.model_bridge import DecoderBridge, register_bridge


@register_bridge("Qwen3MoeForCausalLM", model_type="qwen3_moe")
class Qwen3MoeBridge(DecoderBridge):
    fields = (
        *DENSE,
        *SWITCHED_WINDOWS[:2],
        *moe.expert_sizes("num_local_experts"),
        *moe.DENSE_AMONG_SPARSE,
        moe.NORM_TOPK,
        moe.ATTENTION_BIAS_OF_EXPERTS,
        moe.AUX_LOSS,
    )
    fixed = {**LLAMA_LIKE, **moe.SOFTMAX_ROUTING, "add_bias_linear": False, "qk_layernorm": True}
    irrelevant = {
        "output_router_logits": None,
        "max_window_layers": None,
    }
    weights = (ends(), attention(qk_norm=True), mlp(), router(), experts())
