# SPDX-License-Identifier: Apache-2.0
"""Qwen3-Next: gated delta nets and gated attention, routed experts beside a gated shared one."""

from typing import Any

from megatron.bridge.models.families import *

_LAYER = (
    attention(qk_norm=True, gated=True),
    mlp(),
    router(),
    experts(),
    shared_experts("mlp.shared_expert", gate="mlp.shared_expert_gate"),
)


def _next_tokens(_: Any, depth: int) -> MTPNames:
    own = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm")
    return MTPNames(f"mtp.layers.{depth}", *own)


@register_bridge("Qwen3NextForCausalLM", model_type="qwen3_next")
class Qwen3NextBridge(DecoderBridge):
    # No key of the config tells of the layer of multi-token prediction that checkpoints have, and transformers leaves
    # it out: its tensors are carried over, or converted if ``mtp_num_layers`` of the provider is set to 1.
    fields = (
        *override(DENSE, PARTIAL_ROPE, SILU),
        *DELTA_NET,
        *expert_sizes(),
        *DENSE_AMONG_SPARSE,
        NORM_TOPK,
        ATTENTION_BIAS_OF_EXPERTS,
        AUX_LOSS,
        Field("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
    )
    fixed = {
        **LLAMA_LIKE,
        **SOFTMAX_ROUTING,
        "add_bias_linear": False,
        "layernorm_zero_centered_gamma": True,
        "qk_layernorm": True,
        "attention_output_gate": True,
        "experimental_attention_variant": "gated_delta_net",
        "moe_shared_expert_gate": True,
    }
    irrelevant = {
        "full_attention_interval": None,  # it stands in for layer_types, which transformers always fills in
        "output_router_logits": None,
        "use_sliding_window": (False,),
    }
    weights = (ends(), delta_net(), *_LAYER, mtp(*_LAYER, names=_next_tokens))
    buffers = (*MegatronModelBridge.buffers, "mtp.**")
