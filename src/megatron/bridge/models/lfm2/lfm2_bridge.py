# SPDX-License-Identifier: Apache-2.0
"""LFM2: gated short convolutions among attention with normalized queries and keys."""

import torch.nn.functional as F

from megatron.bridge.models.families import (
    ADJUSTED_WIDTH,
    DENSE,
    LLAMA_LIKE,
    NORM_SIGMOIDS,
    SCALING,
    SHORT_CONV,
    SIGMOID_ROUTING,
    DecoderBridge,
    Field,
    attention,
    dense_before_sparse,
    ends,
    expert_sizes,
    experts,
    mlp,
    register_bridge,
    router,
    short_conv,
)

_OTHER = ("rms_norm_eps", "hidden_act", "attention_dropout", "tie_word_embeddings")
_FIELDS = (
    *(field for field in DENSE if field.hf not in _OTHER),
    Field("norm_eps", "layernorm_epsilon"),
    Field("tie_word_embeddings", "share_embeddings_and_output_weights", default=True),
    *SHORT_CONV,
)
# of the training code that some configs tell of; transformers reads none of them
_UNREAD = (
    "block_mlp_init_scale",
    "block_out_init_scale",
    "block_use_xavier_init",
    "conv_use_xavier_init",
)
_REPEATED = ("block_dim", "block_norm_eps", "conv_dim", "conv_dim_out", "num_heads")
_ROUTING = {
    key: value for key, value in SIGMOID_ROUTING.items() if key != "moe_router_enable_expert_bias"
}


@register_bridge("Lfm2ForCausalLM", model_type="lfm2")
class Lfm2Bridge(DecoderBridge):
    """LFM2, dense: gated short convolutions among attention with normalized queries and keys."""

    fields = (*(field for field in _FIELDS if field.hf != "intermediate_size"), *ADJUSTED_WIDTH)
    fixed = {
        **LLAMA_LIKE,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "attention_dropout": 0.0,
    }
    fixed |= {"qk_layernorm": True}
    irrelevant = {**dict.fromkeys((*_UNREAD, *_REPEATED, "full_attn_idxs")), "conv_bias": (False,)}
    irrelevant |= {"block_use_swiglu": (True,), "use_pos_enc": (True,)}
    weights = (
        ends(norm="model.embedding_norm"),
        attention(norm="operator_norm", output="self_attn.out_proj", qk_norm="layernorm"),
        short_conv(),
        mlp(norm="ffn_norm", names="feed_forward", projections=("w1", "w3", "w2")),
    )


@register_bridge("Lfm2MoeForCausalLM", model_type="lfm2_moe")
class Lfm2MoeBridge(DecoderBridge):
    """LFM2 with experts, 8B-A1B: short convolutions, sigmoid routing, dense layers first."""

    fields = (
        *_FIELDS,
        *expert_sizes(),
        dense_before_sparse("num_dense_layers"),
        NORM_SIGMOIDS,
        SCALING,
        Field("use_expert_bias", "moe_router_enable_expert_bias", default=True),
    )
    fixed = {**Lfm2Bridge.fixed, **_ROUTING}
    irrelevant = {
        "conv_bias": (False,),
        "use_pos_enc": (True,),
        "full_attn_idxs": None,  # it stands in for layer_types
    }
    weights = (
        *Lfm2Bridge.weights,
        router("feed_forward.gate", "expert_bias", correction_in="feed_forward"),
        experts("feed_forward.experts.*", gate="w1", up="w3", down="w2"),
    )
