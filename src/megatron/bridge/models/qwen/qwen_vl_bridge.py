# SPDX-License-Identifier: Apache-2.0
"""Qwen2-VL to Qwen3.6 with images: positions on three axes."""

from collections.abc import Mapping

from megatron.bridge.models.families import (
    MegatronMappingRegistry,
    TensorEntry,
    VisionBridge,
    as_stacked,
    register_bridge,
    stacked_experts,
    with_stacked_experts,
)


@register_bridge("Qwen2VLForConditionalGeneration", model_type="qwen2_vl")
class Qwen2VLBridge(VisionBridge):
    """Qwen2-VL and Qwen2.5-VL: Qwen2's decoder, positions on three axes."""

    texts = {"qwen2_vl_text": "Qwen2ForCausalLM"}
    tower = ("visual",)
    names = {"model.": "model.", "visual.": "visual."}
    other_names = {"model.visual.": {"model.": "model.language_model.", "visual.": "model.visual."}}


@register_bridge("Qwen2_5_VLForConditionalGeneration", model_type="qwen2_5_vl")
class Qwen25VLBridge(Qwen2VLBridge):
    texts = {"qwen2_5_vl_text": "Qwen2ForCausalLM"}


@register_bridge("Qwen3VLForConditionalGeneration", model_type="qwen3_vl")
class Qwen3VLBridge(VisionBridge):
    """Qwen3-VL: Qwen3's decoder, positions on three axes that take turns, features behind its first layers too."""

    texts = {"qwen3_vl_text": "Qwen3ForCausalLM"}
    tower = ("visual",)
    names = {"model.": "model.language_model.", "visual.": "model.visual."}
    text_values = {"layer_types": lambda text: ["full_attention"] * text["num_hidden_layers"]}
    values = {"mrope_interleaved": True, "mrope_section": [24, 20, 20]}


@register_bridge("Qwen3VLMoeForConditionalGeneration", model_type="qwen3_vl_moe")
class Qwen3VLMoEBridge(Qwen3VLBridge):
    """Qwen3-VL 30B-A3B and 235B-A22B: Qwen3's decoder with experts, which one tensor of a layer holds together."""

    texts = {"qwen3_vl_moe_text": "Qwen3MoeForCausalLM"}
    text_values = {"norm_topk_prob": True}
    extra_weights = stacked_experts("mlp.experts", turned=True)

    def spelled_as(
        self, registry: MegatronMappingRegistry, entries: Mapping[str, TensorEntry]
    ) -> MegatronMappingRegistry:
        """Published checkpoints have an expert's matrices as [in, out], those that transformers makes do not."""
        return as_stacked(registry, entries, "model.language_model.layers.*")

    def as_modules(self, registry: MegatronMappingRegistry) -> MegatronMappingRegistry:
        """Return the mappings under the names of transformers' modules, whose experts are [out, in]."""
        modules = VisionBridge.as_modules(self, registry)
        return with_stacked_experts(modules, "model.language_model.layers.*")


@register_bridge("Qwen3_5ForConditionalGeneration", model_type="qwen3_5")
class Qwen35VLBridge(Qwen3VLBridge):
    """Qwen3.5 and Qwen3.6 as published: the text model after Qwen3-VL's tower without its deeper features."""

    texts = {"qwen3_5_text": "Qwen3_5ForCausalLM"}
    text_values = {}
    values = {"mrope_interleaved": True, "mrope_section": [11, 11, 10]}
    irrelevant = {
        "deepstack_visual_indexes": ([],),  # of Qwen3-VL's tower
        "language_model_only": (False,),  # of other software
    }


@register_bridge("Qwen3_5MoeForConditionalGeneration", model_type="qwen3_5_moe")
class Qwen35VLMoeBridge(Qwen35VLBridge):
    texts = {"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"}
    spelled_as = Qwen3VLMoEBridge.spelled_as
    as_modules = Qwen3VLMoEBridge.as_modules
