# SPDX-License-Identifier: Apache-2.0
"""Nemotron Nano VL v2 12B: RADIO in front of Nemotron Nano v2; images are tiles of one size."""

from collections.abc import Mapping
from typing import Any

from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.model_bridge import register_bridge
from megatron.bridge.models.nemotron import radio_names
from megatron.bridge.models.nemotron.nemotron_h_omni_bridge import NemotronHOmniBridge
from megatron.bridge.models.vision.provider import VisionHybridModelProvider
from megatron.bridge.utils.errors import UserError


@register_bridge("NemotronH_Nano_VL_V2", provider=VisionHybridModelProvider, model_type="NemotronH_Nano_VL_V2")
class NemotronNanoVLBridge(NemotronHOmniBridge):
    irrelevant = {**radio_names.OF_REMOTE_CODE, "layers_block_type": None, "tie_word_embeddings": (False,)}
    other_names = {"language_model.model.": {**NemotronHOmniBridge.names, "backbone.": "language_model.model."}}

    def _check(self, whole: Mapping[str, Any]) -> None:
        super()._check(whole)
        if (version := whole.get("ps_version", "v1")) != "v2":
            raise UserError(f"ps_version={version!r}, which transposes tiles, is not supported: v2 is")

    def as_modules(self, registry: MegatronMappingRegistry) -> MegatronMappingRegistry:
        """Modules of the remote code are called as its tensors."""
        return registry
