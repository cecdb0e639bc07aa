# SPDX-License-Identifier: Apache-2.0
"""Falcon-H1: a Mamba-2 mixer beside attention in every layer, multipliers everywhere."""

from dataclasses import replace

from megatron.bridge.models.families import *


@register_bridge("FalconH1ForCausalLM", model_type="falcon_h1")
class FalconH1Bridge(DecoderBridge):
    fields = (
        *(field for field in DENSE if field.hf != "hidden_act"),
        *MAMBA_BESIDE_ATTENTION,
        Field("embedding_multiplier", "embedding_multiplier", default=1.0),
        replace(LOGIT_SCALE, hf="lm_head_multiplier"),
        *(constant(key, False) for key in ("attention_bias", "mlp_bias", "projectors_bias")),
    )
    fixed = {**LLAMA_LIKE, "add_bias_linear": False}
    irrelevant = dict.fromkeys(("mamba_expand", "mamba_chunk_size", "mamba_norm_before_gate", "num_logits_to_keep"))
    irrelevant |= {"attn_layer_indices": (None,), "mamba_use_mlp": (True,), "mlp_expansion_factor": None}
    weights = (
        ends(norm="model.final_layernorm"),
        attention(),
        mamba("model.layers.*", "mamba", None, ours="self_attention.mixer"),
        mlp(norm="pre_ff_layernorm", names="feed_forward"),
    )
