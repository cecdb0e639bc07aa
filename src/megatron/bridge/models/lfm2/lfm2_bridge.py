# SPDX-License-Identifier: Apache-2.0
"""LFM2, dense: gated short convolutions among attention with normalised queries and keys."""

import torch.nn.functional as F

from megatron.bridge.models.families import *

_OTHER = ("rms_norm_eps", "intermediate_size", "hidden_act", "attention_dropout", "tie_word_embeddings")
# of the training code that some configs tell of; transformers reads none of them
_UNREAD = ("block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init", "conv_use_xavier_init")
_REPEATED = ("block_dim", "block_norm_eps", "conv_dim", "conv_dim_out", "num_heads")


@register_bridge("Lfm2ForCausalLM", model_type="lfm2")
class Lfm2Bridge(DecoderBridge):
    fields = (
        *(field for field in DENSE if field.hf not in _OTHER),
        Field("norm_eps", "layernorm_epsilon"),
        Field("tie_word_embeddings", "share_embeddings_and_output_weights", default=True),
        *ADJUSTED_WIDTH,
        *SHORT_CONV,
    )
    fixed = {**LLAMA_LIKE, "activation_func": F.silu, "add_bias_linear": False, "attention_dropout": 0.0}
    fixed |= {"qk_layernorm": True}
    irrelevant = {**dict.fromkeys((*_UNREAD, *_REPEATED, "full_attn_idxs")), "conv_bias": (False,)}
    irrelevant |= {"block_use_swiglu": (True,), "use_pos_enc": (True,)}
    weights = (
        ends(norm="model.embedding_norm"),
        attention(norm="operator_norm", output="self_attn.out_proj", qk_norm="layernorm"),
        short_conv(),
        mlp(norm="ffn_norm", names="feed_forward", projections=("w1", "w3", "w2")),
    )
