# SPDX-License-Identifier: Apache-2.0
"""Llama 1 to 4."""

from megatron.bridge.models.families import (
    ATTENTION_BIAS_OF_EXPERTS,
    AUX_LOSS,
    BIASES,
    CHUNKS,
    DENSE,
    DROPLESS,
    LISTED_EXPERTS,
    LLAMA_LIKE,
    LLAVA_NAMES,
    NO_ROPE_LAYERS,
    QUERY_GROWTH,
    DecoderBridge,
    Field,
    MegatronMappingRegistry,
    VisionBridge,
    attention,
    ends,
    mlp,
    register_bridge,
    router,
    shared_experts,
    stacked_experts,
)


@register_bridge("LlamaForCausalLM", model_type="llama")
class LlamaBridge(DecoderBridge):
    """Llama decoders: Llama 1 to 3.3, Code Llama, SmolLM2 and others of the same architecture."""

    fields = (*DENSE, *BIASES)
    fixed = LLAMA_LIKE
    weights = (ends(), attention(), mlp())


@register_bridge("Llama4ForCausalLM", model_type="llama4_text")
class Llama4Bridge(DecoderBridge):
    """Llama 4's decoder: chunks of attention, layers without rotary embedding, one expert for each token."""

    fields = (
        *(field for field in DENSE if field.hf != "intermediate_size"),
        *LISTED_EXPERTS,
        *CHUNKS,
        *QUERY_GROWTH,
        NO_ROPE_LAYERS,
        ATTENTION_BIAS_OF_EXPERTS,
        AUX_LOSS,
        Field("use_qk_norm", "qk_l2_norm", default=True),
    )
    fixed = {
        **LLAMA_LIKE,
        **DROPLESS,
        "rotary_interleaved": True,
        "add_bias_linear": False,
        "moe_router_score_function": "sigmoid",
        "moe_router_load_balancing_type": "aux_loss",
        "moe_apply_probs_on_input": True,
    }
    # what transformers makes lists of layers from, which it always fills in; and what it does not read
    irrelevant = {
        **dict.fromkeys(("interleave_moe_layer_step", "no_rope_layer_interval")),
        **dict.fromkeys(("router_jitter_noise", "for_llm_compressor")),
    }
    weights = (
        ends(),
        attention(),
        mlp(names="feed_forward"),
        router("feed_forward.router"),
        stacked_experts("feed_forward.experts", turned=True),
        shared_experts("feed_forward.shared_expert"),
    )


@register_bridge("Llama4ForConditionalGeneration", model_type="llama4")
class Llama4VLBridge(VisionBridge):
    """Llama 4 as it is published, Scout and Maverick: the decoder behind a tower whose images are tiles."""

    texts = {"llama4_text": "Llama4ForCausalLM"}
    tower = ("vision_model", "multi_modal_projector")
    names = LLAVA_NAMES

    def as_modules(self, registry: MegatronMappingRegistry) -> MegatronMappingRegistry:
        """Transformers' modules have the names of the checkpoint."""
        return registry
