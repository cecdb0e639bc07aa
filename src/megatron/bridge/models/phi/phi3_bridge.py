# SPDX-License-Identifier: Apache-2.0
"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: queries, keys and values in one tensor, gate and up in another."""

from typing import Any

from megatron.bridge.models.families import *


def _trained_length(_: Any, provider: Any) -> int:
    scaling: dict[str, Any] = provider.rope_parameters or {}
    return scaling.get("original_max_position_embeddings", provider.max_position_embeddings)


TRAINED_LENGTH = Field("original_max_position_embeddings", (), default=None, back=_trained_length)
"""A copy of what ``rope_parameters`` has, which transformers takes first."""


@register_bridge("Phi3ForCausalLM", model_type="phi3")
class Phi3Bridge(DecoderBridge):
    fields = (*override(DENSE, PARTIAL_ROPE), WINDOW, TRAINED_LENGTH)
    fixed = {**LLAMA_LIKE, "add_bias_linear": False}
    irrelevant = {
        "resid_pdrop": (0.0,),
        "embd_pdrop": (0.0,),
        "partial_rotary_factor": None,  # transformers copies it into rope_parameters
        # what else Phi's own code can do, and no published model does
        **dict.fromkeys(("attention_bias", "mlp_bias", "lm_head_bias"), (False,)),
        **dict.fromkeys(("full_attn_mod", "interpolate_factor"), (1,)),
    }
    weights = (ends(), attention(fused=True), mlp(fused=True))
