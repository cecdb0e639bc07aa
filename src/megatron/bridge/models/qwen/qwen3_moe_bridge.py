# SPDX-License-Identifier: Apache-2.0
"""Qwen3-30B-A3B, Qwen3-235B-A22B and Qwen3-Coder: normalised queries and keys, dense layers among the sparse."""

from megatron.bridge.models.families import *


@register_bridge("Qwen3MoeForCausalLM", model_type="qwen3_moe")
class Qwen3MoeBridge(DecoderBridge):
    fields = (
        *DENSE,
        *SWITCHED_WINDOWS[:2],
        *expert_sizes("num_local_experts"),
        *DENSE_AMONG_SPARSE,
        NORM_TOPK,
        ATTENTION_BIAS_OF_EXPERTS,
        AUX_LOSS,
    )
    fixed = {**LLAMA_LIKE, **SOFTMAX_ROUTING, "add_bias_linear": False, "qk_layernorm": True}
    irrelevant = {"output_router_logits": None, "max_window_layers": None}
    weights = (ends(), attention(qk_norm=True), mlp(), router(), experts())
