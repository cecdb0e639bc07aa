# SPDX-License-Identifier: Apache-2.0
"""SmolLM3: Llama's layers, every few of them without a rotary embedding."""

from megatron.bridge.models.families import *


@register_bridge("SmolLM3ForCausalLM", model_type="smollm3")
class SmolLM3Bridge(DecoderBridge):
    fields = (*DENSE, *BIASES, *SWITCHED_WINDOWS, NO_ROPE_LAYERS)
    fixed = LLAMA_LIKE
    # what no_rope_layers and layer_types, which transformers always fills in, are made from
    irrelevant = {"no_rope_layer_interval": None, "max_window_layers": None}
    weights = (ends(), attention(), mlp())
