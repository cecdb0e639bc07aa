# SPDX-License-Identifier: Apache-2.0
"""Mistral's decoders, dense, with experts, and behind a tower for images."""

from megatron.bridge.models.families import (
    AUX_LOSS,
    DENSE,
    LLAMA_LIKE,
    LLAVA_NAMES,
    LLAVA_OTHER_NAMES,
    SCALED_QUERY_ROPE,
    SOFTMAX_ROUTING,
    WINDOW,
    WINDOWS,
    DecoderBridge,
    VisionBridge,
    attention,
    ends,
    expert_sizes,
    experts,
    mlp,
    override,
    register_bridge,
    router,
)


@register_bridge("MistralForCausalLM", model_type="mistral")
class MistralBridge(DecoderBridge):
    """Mistral 7B, Nemo and Small: Llama's layers with one window for all of them, or none."""

    fields = (*DENSE, WINDOW)
    fixed = {**LLAMA_LIKE, "add_bias_linear": False}
    weights = (ends(), attention(), mlp())


@register_bridge("MinistralForCausalLM", model_type="ministral")
class MinistralBridge(MistralBridge):
    """Ministral 8B of 2024: Mistral's layers, a window in those that say so."""

    fields = (*DENSE, *WINDOWS)


@register_bridge("Ministral3ForCausalLM", model_type="ministral3")
class Ministral3Bridge(MistralBridge):
    """The text model of Ministral 3: Mistral's layers, and queries that grow with their position."""

    fields = (*override(DENSE, SCALED_QUERY_ROPE), WINDOW)


@register_bridge("MixtralForCausalLM", model_type="mixtral")
class MixtralBridge(DecoderBridge):
    """Mixtral: Mistral's decoder with experts in every layer."""

    fields = (*DENSE, WINDOW, *expert_sizes("num_local_experts", "intermediate_size"), AUX_LOSS)
    fixed = {**LLAMA_LIKE, **SOFTMAX_ROUTING, "add_bias_linear": False}
    irrelevant = {"router_jitter_noise": (0.0,)}
    weights = (
        ends(),
        attention(),
        router("block_sparse_moe.gate", norm="post_attention_layernorm"),
        experts("block_sparse_moe.experts.*", gate="w1", up="w3", down="w2"),
    )


@register_bridge("Mistral3ForConditionalGeneration", model_type="mistral3")
class Mistral3Bridge(VisionBridge):
    """Mistral Small 3.1 and 3.2, Ministral 3: Pixtral's tower in front of Mistral's decoder."""

    texts = {"mistral": "MistralForCausalLM", "ministral3": "Ministral3ForCausalLM"}
    names = LLAVA_NAMES
    other_names = LLAVA_OTHER_NAMES
