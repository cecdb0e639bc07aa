# SPDX-License-Identifier: Apache-2.0
"""Gemma 3, text: windows with a rotary base of their own in five of six layers, normed queries and keys."""

from megatron.bridge.models.families import *
from megatron.bridge.models.gemma.gemma2_bridge import Gemma2Bridge


@register_bridge("Gemma3ForCausalLM", model_type="gemma3_text")
class Gemma3Bridge(Gemma2Bridge):
    fields = tuple(field for field in override(Gemma2Bridge.fields, LAYER_ROPE) if field.hf != "attn_logit_softcapping")
    fixed = {**Gemma2Bridge.fixed, "qk_layernorm": True}
    # transformers reads the soft-capping of scores and applies none
    irrelevant = {
        **Gemma2Bridge.irrelevant,
        "attn_logit_softcapping": (None,),
        "sliding_window_pattern": None,
        "_sliding_window_pattern": None,
    }
    weights = (*Gemma2Bridge.weights[:1], attention(qk_norm=True), *Gemma2Bridge.weights[2:])
