# SPDX-License-Identifier: Apache-2.0
"""LFM2 with experts, 8B-A1B: short convolutions, sigmoid routing, dense layers first."""

from torch.nn import functional as F

from megatron.bridge.models.families import *

_OTHER = ("rms_norm_eps", "hidden_act", "attention_dropout", "tie_word_embeddings")
_ROUTING = {key: value for key, value in SIGMOID_ROUTING.items() if key != "moe_router_enable_expert_bias"}


@register_bridge("Lfm2MoeForCausalLM", model_type="lfm2_moe")
class Lfm2MoeBridge(DecoderBridge):
    fields = (
        *(field for field in DENSE if field.hf not in _OTHER),
        Field("norm_eps", "layernorm_epsilon"),
        Field("tie_word_embeddings", "share_embeddings_and_output_weights", default=True),
        *SHORT_CONV,
        *expert_sizes(),
        dense_before_sparse("num_dense_layers"),
        NORM_SIGMOIDS,
        SCALING,
        Field("use_expert_bias", "moe_router_enable_expert_bias", default=True),
    )
    fixed = {**LLAMA_LIKE, **_ROUTING, "activation_func": F.silu, "add_bias_linear": False}
    fixed |= {"qk_layernorm": True, "attention_dropout": 0.0}
    irrelevant = {
        "conv_bias": (False,),
        "output_router_logits": None,
        "use_pos_enc": (True,),
        "full_attn_idxs": None,  # it stands in for layer_types
    }
    weights = (
        ends(norm="model.embedding_norm"),
        attention(norm="operator_norm", output="self_attn.out_proj", qk_norm="layernorm"),
        short_conv(),
        mlp(norm="ffn_norm", names="feed_forward", projections=("w1", "w3", "w2")),
        router("feed_forward.gate", "expert_bias", correction_in="feed_forward"),
        experts("feed_forward.experts.*", gate="w1", up="w3", down="w2"),
    )
