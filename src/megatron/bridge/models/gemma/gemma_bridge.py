# SPDX-License-Identifier: Apache-2.0
"""Gemma 1 and CodeGemma: embeddings scaled by the root of their width, norms stored as their distance from one."""

from megatron.bridge.models.families import *

GEMMA_LIKE = {
    **LLAMA_LIKE,
    "layernorm_zero_centered_gamma": True,
    "embedding_multiplier": "sqrt_hidden_size",
    "mlp_bias": False,
}


@register_bridge("GemmaForCausalLM", model_type="gemma")
class GemmaBridge(DecoderBridge):
    fields = (*DENSE, ATTENTION_BIAS)
    fixed = GEMMA_LIKE
    irrelevant = {"hidden_activation": (None, "gelu_pytorch_tanh"), "use_bidirectional_attention": (None, False)}
    weights = (ends(), attention(), mlp())
