# SPDX-License-Identifier: Apache-2.0
"""Falcon and Falcon-H1; Falcon 3 is a Llama."""

from dataclasses import replace
from typing import Any

from megatron.bridge.models.families import (
    DENSE,
    FALCON,
    LAYER_NORM_LIKE,
    LLAMA_LIKE,
    LOGIT_SCALE,
    MAMBA_BESIDE_ATTENTION,
    Block,
    DecoderBridge,
    Field,
    attention,
    constant,
    ends,
    mamba,
    mlp,
    register_bridge,
)


def _layer_block(config: Any) -> Block:
    first, second = {
        "own_norms": ("ln_attn", "ln_mlp"),
        "shared_norm": ("input_layernorm", None),
        None: ("input_layernorm", "post_attention_layernorm"),
    }[config.parallel_residual]
    layers = "transformer.h.*"
    names = "self_attention"
    return (
        *attention(
            layers, first, f"{names}.dense", fused="query_key_value", names=names, grouped=True
        ),
        *mlp(layers, second, gated=False, projections=("", "dense_h_to_4h", "dense_4h_to_h")),
    )


@register_bridge("FalconForCausalLM", model_type="falcon")
class FalconBridge(DecoderBridge):
    """Falcon 7B, 40B, 180B, RW and Falcon 2: most have attention and MLP side by side. Falcon 3 is a Llama."""

    fields = FALCON
    fixed = {**LAYER_NORM_LIKE, "gated_linear_unit": False}
    del fixed["position_embedding_type"]  # a field sets it
    irrelevant = {
        "hidden_dropout": (0.0,),  # of the sum of both parts, not of each
        "apply_residual_connection_post_layernorm": (False,),
        **dict.fromkeys(("n_embed", "n_head", "n_layer")),  # copies under older names
    }
    has_padding_row = False
    weights = (ends("transformer.word_embeddings.weight", "transformer.ln_f"), _layer_block)


@register_bridge("FalconH1ForCausalLM", model_type="falcon_h1")
class FalconH1Bridge(DecoderBridge):
    """Falcon-H1: a Mamba-2 mixer in addition to attention in every layer, multipliers everywhere."""

    fields = (
        *(field for field in DENSE if field.hf != "hidden_act"),
        *MAMBA_BESIDE_ATTENTION,
        Field("embedding_multiplier", "embedding_multiplier", default=1.0),
        replace(LOGIT_SCALE, hf="lm_head_multiplier"),
        *(constant(key, False) for key in ("attention_bias", "mlp_bias", "projectors_bias")),
    )
    fixed = {**LLAMA_LIKE, "add_bias_linear": False}
    irrelevant = dict.fromkeys(
        ("mamba_expand", "mamba_chunk_size", "mamba_norm_before_gate", "num_logits_to_keep")
    )
    irrelevant |= {
        "attn_layer_indices": (None,),
        "mamba_use_mlp": (True,),
        "mlp_expansion_factor": None,
    }
    weights = (
        ends(norm="model.final_layernorm"),
        attention(),
        mamba("model.layers.*", "mamba", None, module="self_attention.mixer"),
        mlp(norm="pre_ff_layernorm", names="feed_forward"),
    )
