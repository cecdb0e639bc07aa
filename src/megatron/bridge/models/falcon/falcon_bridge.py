# SPDX-License-Identifier: Apache-2.0
"""Falcon 7B, 40B, 180B and Falcon 2: attention and MLP side by side, few key heads. Falcon 3 is a Llama."""

from typing import Any

from megatron.bridge.models.families import *


def _layer(config: Any) -> Block:
    first, second = {
        "own_norms": ("ln_attn", "ln_mlp"),
        "shared_norm": ("input_layernorm", None),
        None: ("input_layernorm", "post_attention_layernorm"),
    }[config.parallel_residual]
    layers, names = "transformer.h.*", "self_attention"
    return (
        *attention(layers, first, f"{names}.dense", fused="query_key_value", names=names, grouped=True),
        *mlp(layers, second, gated=False, projections=("", "dense_h_to_4h", "dense_4h_to_h")),
    )


@register_bridge("FalconForCausalLM", model_type="falcon")
class FalconBridge(DecoderBridge):
    fields = FALCON
    fixed = {**LAYER_NORM_LIKE, "gated_linear_unit": False}
    irrelevant = {
        "hidden_dropout": (0.0,),  # of the sum of both parts, not of each
        "apply_residual_connection_post_layernorm": (False,),
        **dict.fromkeys(("n_embed", "n_head", "n_layer")),  # copies under older names
    }
    weights = (ends("transformer.word_embeddings.weight", "transformer.ln_f"), _layer)
