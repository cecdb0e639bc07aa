# SPDX-License-Identifier: Apache-2.0
"""LFM2 with experts, 8B-A1B: short convolutions, sigmoid routing, dense layers first."""

from torch.nn import functional as F

from megatron.bridge.models.conversion.declare import moe_fields as moe
from megatron.bridge.models.conversion.declare.blocks import attention, ends, mlp
from megatron.bridge.models.conversion.declare.decoder_fields import DENSE, LLAMA_LIKE
from megatron.bridge.models.conversion.declare.fields import Field
from megatron.bridge.models.conversion.declare.moe_blocks import experts, router
from megatron.bridge.models.conversion.declare.short_conv import SHORT_CONV, short_conv
from megatron.bridge.models.conversion.model_bridge import DecoderBridge, register_bridge

_OTHER = ("rms_norm_eps", "hidden_act", "attention_dropout", "tie_word_embeddings")
_ROUTING = {key: value for key, value in moe.SIGMOID_ROUTING.items() if key != "moe_router_enable_expert_bias"}


@register_bridge("Lfm2MoeForCausalLM", model_type="lfm2_moe")
class Lfm2MoeBridge(DecoderBridge):
    fields = (
        *(field for field in DENSE if field.hf not in _OTHER),
        Field("norm_eps", "layernorm_epsilon"),
        Field("tie_word_embeddings", "share_embeddings_and_output_weights", default=True),
        *SHORT_CONV,
        *moe.expert_sizes(),
        moe.dense_before_sparse("num_dense_layers"),
        moe.NORM_SIGMOIDS,
        moe.SCALING,
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
