# SPDX-License-Identifier: Apache-2.0
"""Granite 3 with experts, 1B-A400M and 3B-A800M: Granite's multipliers, experts in every layer."""

from megatron.bridge.models.families import *
from megatron.bridge.models.granite.granite_bridge import GraniteBridge


@register_bridge("GraniteMoeForCausalLM", model_type="granitemoe")
class GraniteMoeBridge(DecoderBridge):
    fields = (
        *(field for field in GraniteBridge.fields if field not in BIASES),
        *expert_sizes("num_local_experts", "intermediate_size"),
        ATTENTION_BIAS_OF_EXPERTS,
        AUX_LOSS,
    )
    fixed = {**LLAMA_LIKE, **SOFTMAX_ROUTING, "add_bias_linear": False}
    irrelevant = {"output_router_logits": None}
    weights = (
        ends(),
        attention(),
        router("block_sparse_moe.router.layer", norm="post_attention_layernorm"),
        stacked_experts("block_sparse_moe", "input_linear.weight", "output_linear.weight"),
        shared_experts("shared_mlp", fused=("input_linear", "output_linear")),
    )


@register_bridge("GraniteMoeSharedForCausalLM", model_type="granitemoeshared")
class GraniteMoeSharedBridge(GraniteMoeBridge):
    fields = (
        *GraniteMoeBridge.fields,
        Field(
            "shared_intermediate_size",
            "moe_shared_expert_intermediate_size",
            default=0,
            to=lambda width, _: width or None,
            back=lambda width, _: width or 0,
        ),
    )
