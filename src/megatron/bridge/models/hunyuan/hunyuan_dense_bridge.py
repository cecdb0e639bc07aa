# SPDX-License-Identifier: Apache-2.0
"""Hunyuan, dense, 0.5B to 7B: Llama with queries and keys normed behind the rotary embedding."""

from megatron.bridge.models.families import *

_TOKENS = ("eod_token", "im_start", "im_end", "im_newline", "text_start", "text_end", "mask_init")


@register_bridge("HunYuanDenseV1ForCausalLM", model_type="hunyuan_v1_dense")
class HunYuanDenseV1Bridge(DecoderBridge):
    fields = (*override(DENSE, NTK_ALPHA_ROPE), ATTENTION_BIAS)
    fixed = {**LLAMA_LIKE, "mlp_bias": False, "qk_layernorm": True, "qk_norm_after_rope": True}
    # copies, other names and token ids in published configs; transformers reads none of them
    irrelevant = {
        **dict.fromkeys(f"{name}_id" for name in _TOKENS),
        **dict.fromkeys(("attention_head_dim", "org_vocab_size", "add_classification_head", "class_num")),
        **dict.fromkeys(("pool_type", "dense_list", "norm_type")),
        "use_qk_norm": (True,),
        "use_cla": (False,),
        "mlp_bias": (False,),
        "use_rotary_pos_emb": (True,),
    }
    weights = (ends(), attention(qk_norm=("query_layernorm", "key_layernorm")), mlp())
