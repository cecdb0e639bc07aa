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
