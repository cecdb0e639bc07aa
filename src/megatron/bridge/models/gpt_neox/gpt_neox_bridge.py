# SPDX-License-Identifier: Apache-2.0
"""GPT-NeoX-20B, Pythia and others of EleutherAI: attention and MLP side by side."""

from megatron.bridge.models.families import (
    DENSE,
    LAYER_NORM_LIKE,
    NORM_EPS,
    PARTIAL_ROPE,
    DecoderBridge,
    Field,
    attention,
    ends,
    mlp,
    override,
    parallel_residual,
    register_bridge,
)

_LAYERS = "gpt_neox.layers.*"
_ABSENT = ("num_key_value_heads", "head_dim")


@register_bridge("GPTNeoXForCausalLM", model_type="gpt_neox")
class GPTNeoXBridge(DecoderBridge):
    fields = (
        *(field for field in override(DENSE, PARTIAL_ROPE, NORM_EPS) if field.hf not in _ABSENT),
        Field("attention_bias", "attention_bias", default=True),
        Field("hidden_dropout", "hidden_dropout", default=0.0),
        parallel_residual("own_norms", default=True),
    )
    fixed = {**LAYER_NORM_LIKE, "gated_linear_unit": False}
    # transformers reads neither dropout under these names
    irrelevant = dict.fromkeys(
        ("classifier_dropout", "attention_probs_dropout_prob", "hidden_dropout_prob")
    )
    has_padding_row = False
    weights = (
        ends("gpt_neox.embed_in.weight", "gpt_neox.final_layer_norm", "embed_out.weight"),
        attention(
            _LAYERS,
            output="attention.dense",
            fused="query_key_value",
            names="attention",
            grouped=True,
        ),
        mlp(_LAYERS, gated=False, projections=("", "dense_h_to_4h", "dense_4h_to_h")),
    )
