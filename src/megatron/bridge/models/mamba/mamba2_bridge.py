# SPDX-License-Identifier: Apache-2.0
"""Mamba-2, Codestral Mamba: every layer is a mixer, and none has attention or a feed-forward part."""

from megatron.bridge.models.families import (
    ALL_MAMBA,
    DENSE,
    LLAMA_LIKE,
    DecoderBridge,
    Field,
    MambaModelProvider,
    constant,
    ends,
    mamba,
    register_bridge,
)

_SHARED = ("dtype", "vocab_size", "hidden_size", "initializer_range", "tie_word_embeddings")


@register_bridge("Mamba2ForCausalLM", provider=MambaModelProvider, model_type="mamba2")
class Mamba2Bridge(DecoderBridge):
    fields = (
        *(field for field in DENSE if field.hf in _SHARED),
        *ALL_MAMBA,
        Field("layer_norm_epsilon", "layernorm_epsilon", default=1e-5),
        Field("residual_in_fp32", "fp32_residual_connection", default=True),
        constant("hidden_act", "silu"),
    )
    fixed = {**LLAMA_LIKE, "position_embedding_type": "none"}
    irrelevant = {
        **dict.fromkeys(("time_step_rank", "intermediate_size", "norm_before_gate")),
        "rms_norm": (True,),
    }
    irrelevant |= {
        "rescale_prenorm_residual": (False,)
    }  # transformers 5 would divide projections that it has loaded
    has_padding_row = False
    weights = (
        ends("backbone.embeddings.weight", "backbone.norm_f", stack="final_norm"),
        mamba("backbone.layers.*"),
    )
