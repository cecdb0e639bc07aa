# SPDX-License-Identifier: Apache-2.0
"""GPT-2 and what was trained like it: learned positions, matrices stored as [in, out]."""

from dataclasses import replace

from megatron.bridge.models.families import (
    ACTIVATION,
    DTYPE,
    LAYER_NORM_LIKE,
    DecoderBridge,
    Field,
    ReplicatedMapping,
    attention,
    ends,
    mlp,
    register_bridge,
)

_SUMMARY = tuple(
    f"summary_{name}"
    for name in ("type", "use_proj", "activation", "proj_to_labels", "first_dropout")
)


@register_bridge("GPT2LMHeadModel", model_type="gpt2")
class GPT2Bridge(DecoderBridge):
    fields = (
        DTYPE,
        Field("vocab_size", "vocab_size"),
        Field("n_embd", "hidden_size"),
        Field(
            "n_inner",
            "ffn_hidden_size",
            default=None,
            to=lambda width, config: 4 * config["n_embd"] if width is None else width,
            back=lambda width, provider: None if width == 4 * provider.hidden_size else width,
        ),
        Field("n_layer", "num_layers"),
        Field("n_head", "num_attention_heads"),
        Field("n_positions", ("max_position_embeddings", "seq_length")),
        replace(ACTIVATION, hf="activation_function", default="gelu_new"),
        Field("initializer_range", "init_method_std", default=0.02),
        Field("layer_norm_epsilon", "layernorm_epsilon", default=1e-5),
        Field("tie_word_embeddings", "share_embeddings_and_output_weights", default=True),
        Field("attn_pdrop", "attention_dropout", default=0.1),
        Field("resid_pdrop", "hidden_dropout", default=0.1),
        Field("embd_pdrop", "embedding_dropout", default=0.1),
        Field("scale_attn_by_inverse_layer_idx", "scores_divided_by_layer", default=False),
    )
    fixed = {
        **LAYER_NORM_LIKE,
        "gated_linear_unit": False,
        "position_embedding_type": "learned_absolute",
    }
    irrelevant = {
        **dict.fromkeys(_SUMMARY),
        **dict.fromkeys(("n_ctx", "output_past")),
        "reorder_and_upcast_attn": None,  # softmax in fp32, as it is here
        "scale_attn_weights": (True,),
    }
    has_padding_row = False
    weights = (
        ends("transformer.wte.weight", "transformer.ln_f"),
        (ReplicatedMapping("embedding.position_embeddings.weight", "transformer.wpe.weight"),),
        attention(
            "transformer.h.*", "ln_1", "attn.c_proj", fused="c_attn", names="attn", turned=True
        ),
        mlp(
            "transformer.h.*", "ln_2", gated=False, projections=("", "c_fc", "c_proj"), turned=True
        ),
    )
