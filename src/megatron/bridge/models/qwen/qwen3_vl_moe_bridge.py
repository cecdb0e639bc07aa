# SPDX-License-Identifier: Apache-2.0
"""Qwen3-VL 30B-A3B and 235B-A22B: Qwen3's decoder with experts, which one tensor of a layer holds together."""

from collections.abc import Mapping

from megatron.bridge.models.families import *


@register_bridge("Qwen3VLMoeForConditionalGeneration", model_type="qwen3_vl_moe")
class Qwen3VLMoEBridge(VisionBridge):
    texts = {"qwen3_vl_moe_text": "Qwen3MoeForCausalLM"}
    tower = ("visual",)
    names = {"model.": "model.language_model.", "visual.": "model.visual."}
    text_values = {"norm_topk_prob": True}
    values = {"mrope_interleaved": True, "mrope_section": [24, 20, 20]}
    extra_weights = stacked_experts("mlp.experts", turned=True)

    def spelled_as(
        self, registry: MegatronMappingRegistry, entries: Mapping[str, TensorEntry]
    ) -> MegatronMappingRegistry:
        """Published checkpoints have an expert's matrices as [in, out], those that transformers makes do not."""
        return as_stacked(registry, entries, "model.language_model.layers.*")


@register_bridge("Qwen3_5ForConditionalGeneration", model_type="qwen3_5")
class Qwen35VLBridge(VisionBridge):
    """Qwen3.5 as it is published, 0.8B to 27B and with experts: the text model behind Qwen3-VL's tower."""

    texts = {"qwen3_5_text": "Qwen3_5ForCausalLM"}
    tower = ("visual",)
    names = {"model.": "model.language_model.", "visual.": "model.visual."}
    values = {"mrope_interleaved": True, "mrope_section": [11, 11, 10]}


@register_bridge("Qwen3_5MoeForConditionalGeneration", model_type="qwen3_5_moe")
class Qwen35VLMoeBridge(Qwen35VLBridge):
    texts = {"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"}
    spelled_as = Qwen3VLMoEBridge.spelled_as
