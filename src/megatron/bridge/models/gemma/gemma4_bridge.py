# SPDX-License-Identifier: Apache-2.0
"""Gemma 4, text: KV sharing, keys as values, per-layer embeddings, heads of two widths, experts beside an MLP."""

from dataclasses import replace

from megatron.bridge.models.families import *


@register_bridge("Gemma4ForCausalLM", model_type="gemma4_text")
class Gemma4Bridge(DecoderBridge):
    fields = (
        *override(DENSE, replace(ACTIVATION, hf="hidden_activation"), *SHARED_KV),
        *WINDOWS,
        *PER_LAYER_INPUTS,
        *EXPERTS_BESIDE,
        ATTENTION_BIAS_OF_EXPERTS,
        Field("final_logit_softcapping", "final_logit_softcapping", default=None),
    )
    fixed = {
        **LLAMA_LIKE,
        "embedding_multiplier": "sqrt_hidden_size",
        "add_bias_linear": False,
        "norm_placement": "both",
        "qk_layernorm": True,
        "value_norm": True,
        "layer_scales": True,
        "softmax_scale": 1.0,
    }
    # tokens of images, which this class has not, would see each other both ways
    irrelevant = {"use_bidirectional_attention": (None, "vision")}
    weights = (
        ends(),
        shared_kv_attention,
        mlp(norm="pre_feedforward_layernorm"),
        experts_beside(),
        post_norms("post_attention_layernorm", "post_feedforward_layernorm"),
        layer_ends(),
    )
