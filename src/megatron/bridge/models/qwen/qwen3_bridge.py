# SPDX-License-Identifier: Apache-2.0
"""Qwen3 dense decoders: normalised queries and keys, heads of their own width."""

from megatron.bridge.models.families import *


@register_bridge("Qwen3ForCausalLM", model_type="qwen3")
class Qwen3Bridge(DecoderBridge):
    fields = (*DENSE, ATTENTION_BIAS, *SWITCHED_WINDOWS)
    fixed = {**LLAMA_LIKE, "mlp_bias": False, "qk_layernorm": True}
    irrelevant = {"max_window_layers": None}  # it stands in for layer_types, which transformers always fills in
    weights = (ends(), attention(qk_norm=True), mlp())
