# SPDX-License-Identifier: Apache-2.0
"""Hunyuan with experts, A13B: a softmax over the chosen ones, one shared expert."""

from megatron.bridge.models.conversion.declare import moe_fields as moe
from megatron.bridge.models.conversion.declare.blocks import attention, ends
from megatron.bridge.models.conversion.declare.decoder_fields import DENSE, LLAMA_LIKE, NTK_ALPHA_ROPE
from megatron.bridge.models.conversion.declare.fields import Field, override
from megatron.bridge.models.conversion.declare.moe_blocks import experts, router, shared_experts
from megatron.bridge.models.conversion.model_bridge import DecoderBridge, register_bridge
from megatron.bridge.models.hunyuan.hunyuan_dense_bridge import HunYuanDenseV1Bridge


@register_bridge("HunYuanMoEV1ForCausalLM", model_type="hunyuan_v1_moe")
class HunYuanMoEV1Bridge(DecoderBridge):
    fields = (
        *override(DENSE, NTK_ALPHA_ROPE),
        moe.ATTENTION_BIAS_OF_EXPERTS,
        *(field for field in moe.expert_sizes(chosen="moe_topk") if field.hf != "moe_intermediate_size"),
        # the width of every expert, and of the shared one
        Field("intermediate_size", ("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size")),
    )
    fixed = {
        **LLAMA_LIKE,
        **moe.SOFTMAX_ROUTING,
        "moe_router_dtype": "fp32",
        "add_bias_linear": False,
        "qk_layernorm": True,
        "qk_norm_after_rope": True,
    }
    irrelevant = {**HunYuanDenseV1Bridge.irrelevant, "output_router_logits": None, "use_mixed_mlp_moe": (True,)}
    irrelevant |= dict.fromkeys(("moe_intermediate_size", "num_shared_expert"))  # published, and not read
    weights = (
        ends(),
        attention(qk_norm=("query_layernorm", "key_layernorm")),
        router("mlp.gate.wg", norm="post_attention_layernorm"),
        experts(),
        shared_experts("mlp.shared_mlp"),
    )
