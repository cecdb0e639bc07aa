# SPDX-License-Identifier: Apache-2.0
"""Mixtral: Mistral's decoder with experts in every layer."""

from megatron.bridge.models.conversion.declare import moe_fields as moe
from megatron.bridge.models.conversion.declare.blocks import attention, ends
from megatron.bridge.models.conversion.declare.decoder_fields import DENSE, LLAMA_LIKE, WINDOW
from megatron.bridge.models.conversion.declare.moe_blocks import experts, router
from megatron.bridge.models.conversion.model_bridge import DecoderBridge, register_bridge


@register_bridge("MixtralForCausalLM", model_type="mixtral")
class MixtralBridge(DecoderBridge):
    fields = (*DENSE, WINDOW, *moe.expert_sizes("num_local_experts", "intermediate_size"), moe.AUX_LOSS)
    fixed = {**LLAMA_LIKE, **moe.SOFTMAX_ROUTING, "add_bias_linear": False}
    irrelevant = {"output_router_logits": None, "router_jitter_noise": (0.0,)}
    weights = (
        ends(),
        attention(),
        router("block_sparse_moe.gate", norm="post_attention_layernorm"),
        experts("block_sparse_moe.experts.*", gate="w1", up="w3", down="w2"),
    )
