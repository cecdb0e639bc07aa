# SPDX-License-Identifier: Apache-2.0
"""Gemma 2: windows in every second layer, norms before and after each part, soft-capped scores and logits."""

from dataclasses import replace

from megatron.bridge.models.families import *
from megatron.bridge.models.gemma.gemma_bridge import GEMMA_LIKE


@register_bridge("Gemma2ForCausalLM", model_type="gemma2")
class Gemma2Bridge(DecoderBridge):
    fields = (
        *override(DENSE, replace(ACTIVATION, hf="hidden_activation")),
        *WINDOWS,
        QUERY_SCALE,
        ATTENTION_BIAS,
        Field("attn_logit_softcapping", "attn_logit_softcapping", default=None),
        Field("final_logit_softcapping", "final_logit_softcapping", default=None),
    )
    fixed = {**GEMMA_LIKE, "norm_placement": "both"}
    irrelevant = {"hidden_act": None, "sliding_window_size": None, "use_bidirectional_attention": (None, False)}
    weights = (
        ends(),
        attention(),
        mlp(norm="pre_feedforward_layernorm"),
        post_norms("post_attention_layernorm", "post_feedforward_layernorm"),
    )
