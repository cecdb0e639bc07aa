# SPDX-License-Identifier: Apache-2.0
"""Mixtral: Mistral's decoder with experts in every layer."""

from megatron.bridge.models.families import *


@register_bridge("MixtralForCausalLM", model_type="mixtral")
class MixtralBridge(DecoderBridge):
    fields = (*DENSE, WINDOW, *expert_sizes("num_local_experts", "intermediate_size"), AUX_LOSS)
    fixed = {**LLAMA_LIKE, **SOFTMAX_ROUTING, "add_bias_linear": False}
    irrelevant = {"output_router_logits": None, "router_jitter_noise": (0.0,)}
    weights = (
        ends(),
        attention(),
        router("block_sparse_moe.gate", norm="post_attention_layernorm"),
        experts("block_sparse_moe.experts.*", gate="w1", up="w3", down="w2"),
    )
