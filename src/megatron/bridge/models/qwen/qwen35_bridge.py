# SPDX-License-Identifier: Apache-2.0
"""Qwen3-Next and Qwen3.5: gated delta nets among gated attention."""

from collections.abc import Mapping
from typing import Any

from megatron.bridge.models.families import (
    ATTENTION_BIAS_OF_EXPERTS,
    AUX_LOSS,
    DELTA_NET,
    DENSE,
    DENSE_AMONG_SPARSE,
    LLAMA_LIKE,
    NORM_TOPK,
    PARTIAL_ROPE,
    PARTIAL_ROPE_OF_TEXT,
    SILU,
    SOFTMAX_ROUTING,
    DecoderBridge,
    Field,
    MegatronMappingRegistry,
    MegatronModelBridge,
    MTPNames,
    TensorEntry,
    as_stacked,
    attention,
    delta_net,
    ends,
    expert_sizes,
    experts,
    mlp,
    mtp,
    override,
    register_bridge,
    router,
    shared_experts,
    with_stacked_experts,
)

_LAYER = (
    attention(qk_norm=True, gated=True),
    mlp(),
    router(),
    experts(),
    shared_experts("mlp.shared_expert", gate="mlp.shared_expert_gate"),
)
_GATED_LIKE = {
    **LLAMA_LIKE,
    "add_bias_linear": False,
    "layernorm_zero_centered_gamma": True,
    "qk_layernorm": True,
    "attention_output_gate": True,
    "experimental_attention_variant": "gated_delta_net",
}


def _next_tokens(_: Any, depth: int) -> MTPNames:
    module_names = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm")
    return MTPNames(f"mtp.layers.{depth}", *module_names)


@register_bridge("Qwen3NextForCausalLM", model_type="qwen3_next")
class Qwen3NextBridge(DecoderBridge):
    """Qwen3-Next: gated delta nets and gated attention, routed experts and a gated shared expert."""

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
    fixed = {**_GATED_LIKE, **SOFTMAX_ROUTING, "moe_shared_expert_gate": True}
    irrelevant = {
        "full_attention_interval": None,  # it stands in for layer_types, which transformers always fills in
        "use_sliding_window": (False,),
    }
    weights = (ends(), delta_net(), *_LAYER, mtp(*_LAYER, names=_next_tokens))
    buffers = (*MegatronModelBridge.buffers, "mtp.**")


@register_bridge("Qwen3_5ForCausalLM", model_type="qwen3_5_text")
class Qwen35Bridge(DecoderBridge):
    """Qwen3.5, text: Qwen3-Next's layers, dense or with experts, the delta nets' projections apart."""

    fields = (*override(DENSE, PARTIAL_ROPE_OF_TEXT, SILU), *DELTA_NET, ATTENTION_BIAS_OF_EXPERTS)
    fixed = _GATED_LIKE
    irrelevant = {
        "attn_output_gate": (True,),
        "output_gate_type": ("swish",),
        "mlp_only_layers": ([],),
        "full_attention_interval": None,  # it stands in for layer_types, which transformers always fills in
        # of the layer of multi-token prediction, which transformers leaves out, and of other software
        **dict.fromkeys(
            ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mamba_ssm_dtype")
        ),
    }
    weights = (ends(), delta_net(split=True), attention(qk_norm=True, gated=True), mlp())
    buffers = (*MegatronModelBridge.buffers, "mtp.**")


@register_bridge("Qwen3_5MoeForCausalLM", model_type="qwen3_5_moe_text")
class Qwen35MoEBridge(Qwen35Bridge):
    fields = (
        *(field for field in Qwen35Bridge.fields if field.hf != "intermediate_size"),
        *expert_sizes(),
        AUX_LOSS,
        Field("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
    )
    fixed = {**Qwen35Bridge.fixed, **SOFTMAX_ROUTING, "moe_shared_expert_gate": True}
    weights = (
        *Qwen35Bridge.weights[:-1],
        router(norm="post_attention_layernorm"),
        experts(),
        shared_experts("mlp.shared_expert", gate="mlp.shared_expert_gate"),
    )

    def spelled_as(
        self, registry: MegatronMappingRegistry, entries: Mapping[str, TensorEntry]
    ) -> MegatronMappingRegistry:
        """Checkpoints have each expert's tensors, or two tensors for all of them."""
        return as_stacked(registry, entries, "model.layers.*")

    def as_modules(self, registry: MegatronMappingRegistry) -> MegatronMappingRegistry:
        """The module of all experts has two parameters, and ``peft`` has no other names for them."""
        return with_stacked_experts(registry, "model.layers.*")
