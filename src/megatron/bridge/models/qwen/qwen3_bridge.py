# SPDX-License-Identifier: Apache-2.0
"""Qwen 1.5 to 3, dense and with experts, without images."""

from megatron.bridge.models.families import (
    ATTENTION_BIAS,
    ATTENTION_BIAS_OF_EXPERTS,
    AUX_LOSS,
    DENSE,
    DENSE_AMONG_SPARSE,
    LLAMA_LIKE,
    NORM_TOPK,
    ONLY_QKV_BIAS,
    SOFTMAX_ROUTING,
    SWITCHED_WINDOWS,
    DecoderBridge,
    Field,
    attention,
    ends,
    expert_sizes,
    experts,
    mlp,
    register_bridge,
    router,
    shared_experts,
)


@register_bridge("Qwen2ForCausalLM", model_type="qwen2")
class Qwen2Bridge(DecoderBridge):
    """Qwen1.5, Qwen2, Qwen2.5: biases on queries, keys and values only, a window in the layers that say so."""

    fields = (*DENSE, *SWITCHED_WINDOWS)
    fixed = {**LLAMA_LIKE, **ONLY_QKV_BIAS}
    irrelevant = {
        "max_window_layers": None,  # it stands in for layer_types, which transformers always fills in
        "use_mrope": (False,),
    }
    weights = (ends(), attention(), mlp())


@register_bridge("Qwen3ForCausalLM", model_type="qwen3")
class Qwen3Bridge(DecoderBridge):
    """Qwen3 dense decoders: normalized queries and keys, explicit head width."""

    fields = (*DENSE, ATTENTION_BIAS, *SWITCHED_WINDOWS)
    fixed = {**LLAMA_LIKE, "mlp_bias": False, "qk_layernorm": True}
    irrelevant = {
        "max_window_layers": None
    }  # it stands in for layer_types, which transformers always fills in
    weights = (ends(), attention(qk_norm=True), mlp())


@register_bridge("Qwen2MoeForCausalLM", model_type="qwen2_moe")
class Qwen2MoeBridge(DecoderBridge):
    """Qwen1.5-MoE and Qwen2-57B-A14B: routed experts and a gated shared expert, dense layers among the sparse."""

    fields = (
        *DENSE,
        *SWITCHED_WINDOWS,
        *expert_sizes(),
        *DENSE_AMONG_SPARSE,
        NORM_TOPK,
        AUX_LOSS,
        Field("qkv_bias", "add_qkv_bias", default=True),
        Field("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
    )
    fixed = {
        **LLAMA_LIKE,
        **SOFTMAX_ROUTING,
        "add_bias_linear": False,
        "moe_shared_expert_gate": True,
    }
    irrelevant = {"max_window_layers": None}
    weights = (
        ends(),
        attention(),
        mlp(),
        router(),
        experts(),
        shared_experts("mlp.shared_expert", gate="mlp.shared_expert_gate"),
    )


@register_bridge("Qwen3MoeForCausalLM", model_type="qwen3_moe")
class Qwen3MoeBridge(DecoderBridge):
    """Qwen3-30B-A3B, Qwen3-235B-A22B and Qwen3-Coder: normalized queries and keys, dense layers among the sparse."""

    fields = (
        *DENSE,
        *SWITCHED_WINDOWS[:2],
        *expert_sizes("num_local_experts"),
        *DENSE_AMONG_SPARSE,
        NORM_TOPK,
        ATTENTION_BIAS_OF_EXPERTS,
        AUX_LOSS,
    )
    fixed = {**LLAMA_LIKE, **SOFTMAX_ROUTING, "add_bias_linear": False, "qk_layernorm": True}
    irrelevant = {"max_window_layers": None}
    weights = (ends(), attention(qk_norm=True), mlp(), router(), experts())
