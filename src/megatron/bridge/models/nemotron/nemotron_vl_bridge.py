# SPDX-License-Identifier: Apache-2.0
"""Nemotron with images: RADIO in front of Nemotron-H."""

from collections.abc import Mapping
from typing import Any

from megatron.bridge.models.conversion.declare.vision import VisionBridge
from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.model_bridge import register_bridge
from megatron.bridge.models.hf_pretrained.safetensors_files import TensorEntry
from megatron.bridge.models.nemotron import radio_names
from megatron.bridge.models.vision.provider import VisionHybridModelProvider
from megatron.bridge.utils.errors import UserError


@register_bridge(
    "NemotronH_Omni_Reasoning_V3", provider=VisionHybridModelProvider, model_type="nemotron_h_omni"
)
class NemotronHOmniBridge(VisionBridge):
    """Nemotron 3 Nano Omni: RADIO in front of Nemotron-H; its audio part is carried along."""

    texts = {"nemotron_h": "NemotronHForCausalLM"}
    tower = ()
    names = {"backbone.": radio_names.LANGUAGE, "lm_head.": "language_model.lm_head."}
    irrelevant = radio_names.OF_REMOTE_CODE
    buffers = (*VisionBridge.buffers, *radio_names.BUFFERS)
    extra_weights = radio_names.WEIGHTS

    def provider_bridge(self, hf_pretrained: Any) -> Any:
        provider = super().provider_bridge(hf_pretrained)
        stored = getattr(hf_pretrained, "stored_names", None) or ()
        provider.radio_layer_scales = any(".layer_scale1." in name for name in stored)
        return provider

    def _check(self, full_config: Mapping[str, Any]) -> None:
        super()._check(full_config)
        if count := full_config["text_config"].get("num_nextn_predict_layers"):
            raise UserError(
                f"text_config.num_nextn_predict_layers={count} adds a norm to the tower: set it to 0"
            )

    def carried_by(self, config: Any, entries: Mapping[str, TensorEntry]) -> tuple[str, ...]:
        """Audio, and the tower of a text model that is built without it."""
        if config.vision is not None:
            return radio_names.AUDIO if config.vision.get("audio_config") else ()
        audio = radio_names.AUDIO if any(name.startswith("sound_") for name in entries) else ()
        return ("mlp1.**", "vision_model.**", *audio)

    def as_modules(self, registry: MegatronMappingRegistry) -> MegatronMappingRegistry:
        return radio_names.as_modules(registry)


@register_bridge(
    "NemotronH_Nano_VL_V2", provider=VisionHybridModelProvider, model_type="NemotronH_Nano_VL_V2"
)
class NemotronNanoVLBridge(NemotronHOmniBridge):
    """Nemotron Nano VL v2 12B: RADIO in front of Nemotron Nano v2; images are tiles of one size."""

    irrelevant = {
        **radio_names.OF_REMOTE_CODE,
        "layers_block_type": None,
        "tie_word_embeddings": (False,),
    }
    other_names = {
        "language_model.model.": {**NemotronHOmniBridge.names, "backbone.": "language_model.model."}
    }

    def _check(self, full_config: Mapping[str, Any]) -> None:
        super()._check(full_config)
        if (version := full_config.get("ps_version", "v1")) != "v2":
            raise UserError(
                f"ps_version={version!r}, which transposes tiles, is not supported: v2 is"
            )

    def as_modules(self, registry: MegatronMappingRegistry) -> MegatronMappingRegistry:
        """Modules of the remote code are called as its tensors."""
        return registry
