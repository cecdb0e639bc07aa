# SPDX-License-Identifier: Apache-2.0
"""Qwen3-VL 30B-A3B and 235B-A22B: Qwen3's decoder with experts, which one tensor of a layer holds together."""

from collections.abc import Mapping

from megatron.bridge.models.conversion.declare.blocks import Block
from megatron.bridge.models.conversion.declare.moe_blocks import expert_names
from megatron.bridge.models.conversion.declare.vision import VisionBridge
from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.model_bridge import register_bridge
from megatron.bridge.models.conversion.param_mapping import AutoMapping, ConcatenatedGatedMLPMapping
from megatron.bridge.models.hf_pretrained.safetensors_files import TensorEntry

_UP, _DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"


def _experts(transposed: bool, layers: str = "model.layers.*") -> Block:
    up = (ConcatenatedGatedMLPMapping(name, f"{layers}.{_UP}") for name in expert_names("linear_fc1"))
    down = (AutoMapping(name, f"{layers}.{_DOWN}") for name in expert_names("linear_fc2"))
    return tuple(mapping.stacked(transposed) for mapping in (*up, *down))


@register_bridge("Qwen3VLMoeForConditionalGeneration", model_type="qwen3_vl_moe")
class Qwen3VLMoEBridge(VisionBridge):
    """Hugging Face's ``Qwen3VLMoeForConditionalGeneration`` and Megatron's ``GPTModel`` behind its tower."""

    texts = {"qwen3_vl_moe_text": "Qwen3MoeForCausalLM"}
    tower = ("visual",)
    names = {"model.": "model.language_model.", "visual.": "model.visual."}
    text_values = {"norm_topk_prob": True}
    values = {"mrope_interleaved": True, "mrope_section": [24, 20, 20]}
    extra_weights = _experts(transposed=True)

    def spelled_as(
        self, registry: MegatronMappingRegistry, entries: Mapping[str, TensorEntry]
    ) -> MegatronMappingRegistry:
        """Published checkpoints have an expert's matrices as [in, out], those that transformers makes do not."""
        up, down = (next((e.shape for n, e in entries.items() if n.endswith(end)), None) for end in (_UP, _DOWN))
        if up is None or down is None or (up[1], up[2]) != (2 * down[2], down[1]):
            return registry
        own = {mapping.megatron_param: mapping for mapping in _experts(False, "model.language_model.layers.*")}
        mappings = registry.get_all_mappings()
        return MegatronMappingRegistry(*(own.get(mapping.megatron_param, mapping) for mapping in mappings))
