# SPDX-License-Identifier: Apache-2.0
"""Qwen1.5-MoE and Qwen2-57B-A14B: routed experts beside a gated shared one, dense layers among the sparse."""

from megatron.bridge.models.conversion.declare import moe_fields as moe
from megatron.bridge.models.conversion.declare.blocks import attention, ends, mlp
from megatron.bridge.models.conversion.declare.decoder_fields import DENSE, LLAMA_LIKE, SWITCHED_WINDOWS
from megatron.bridge.models.conversion.declare.fields import Field
from megatron.bridge.models.conversion.declare.moe_blocks import experts, router, shared_experts
from megatron.bridge.models.conversion.model_bridge import DecoderBridge, register_bridge


@register_bridge("Qwen2MoeForCausalLM", model_type="qwen2_moe")
class Qwen2MoeBridge(DecoderBridge):
    fields = (
        *DENSE,
        *SWITCHED_WINDOWS,
        *moe.expert_sizes(),
        *moe.DENSE_AMONG_SPARSE,
        moe.NORM_TOPK,
        moe.AUX_LOSS,
        Field("qkv_bias", "add_qkv_bias", default=True),
        Field("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
    )
    fixed = {**LLAMA_LIKE, **moe.SOFTMAX_ROUTING, "add_bias_linear": False, "moe_shared_expert_gate": True}
    irrelevant = {"output_router_logits": None, "max_window_layers": None}
    weights = (
        ends(),
        attention(),
        mlp(),
        router(),
        experts(),
        shared_experts("mlp.shared_expert", gate="mlp.shared_expert_gate"),
    )
