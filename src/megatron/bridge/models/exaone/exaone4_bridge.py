# SPDX-License-Identifier: Apache-2.0
"""EXAONE 4: norms after attention and MLP, rotary embeddings only in layers with a window."""

from megatron.bridge.models.families import *


@register_bridge("Exaone4ForCausalLM", model_type="exaone4")
class Exaone4Bridge(DecoderBridge):
    fields = (*DENSE, WINDOW, WINDOWED_ROPE_IF_ANY)
    fixed = {**LLAMA_LIKE, "norm_placement": "post", "qk_layernorm": True, "add_bias_linear": False}
    irrelevant = {"sliding_window_pattern": None}  # transformers makes layer_types of it
    weights = (
        ends(),
        attention(norm=None, qk_norm=True),
        mlp(norm=None),
        post_norms("post_attention_layernorm", "post_feedforward_layernorm"),
    )
