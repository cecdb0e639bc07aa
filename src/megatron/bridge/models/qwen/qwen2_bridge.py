# SPDX-License-Identifier: Apache-2.0
"""Qwen1.5, Qwen2, Qwen2.5: biases on queries, keys and values only, a window in the layers that say so."""

from megatron.bridge.models.families import *


@register_bridge("Qwen2ForCausalLM", model_type="qwen2")
class Qwen2Bridge(DecoderBridge):
    fields = (*DENSE, *SWITCHED_WINDOWS)
    fixed = {**LLAMA_LIKE, **ONLY_QKV_BIAS}
    irrelevant = {
        "max_window_layers": None,  # it stands in for layer_types, which transformers always fills in
        "use_mrope": (False,),
    }
    weights = (ends(), attention(), mlp())


@register_bridge("Qwen3ForCausalLM", model_type="qwen3")
class Qwen3Bridge(DecoderBridge):
    """Qwen3 dense decoders: normalised queries and keys, heads of their own width."""

    fields = (*DENSE, ATTENTION_BIAS, *SWITCHED_WINDOWS)
    fixed = {**LLAMA_LIKE, "mlp_bias": False, "qk_layernorm": True}
    irrelevant = {"max_window_layers": None}  # it stands in for layer_types, which transformers always fills in
    weights = (ends(), attention(qk_norm=True), mlp())
