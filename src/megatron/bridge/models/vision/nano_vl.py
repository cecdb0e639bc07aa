# SPDX-License-Identifier: Apache-2.0
"""The vision part of Nemotron Nano VL v2: transformers' Nemotron Omni with tiles of one size."""

from typing import Any

from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.nemotron_h_omni.modeling_nemotron_h_omni import NemotronH_Omni_Reasoning_V3

from megatron.bridge.models.hf_pretrained.remote_configs import NanoVLConfig


class NanoVLModel(NemotronH_Omni_Reasoning_V3):
    """Transformers' model, built without its language model."""

    config: NanoVLConfig
    config_class = NanoVLConfig

    def get_image_features(self, pixel_values: Tensor, **kwargs: Any) -> BaseModelOutputWithPooling:  # type: ignore[override]
        """Features of tiles [tiles, channels, height, width]."""
        height, width = (side // self.vision_model.patch_size for side in pixel_values.shape[-2:])
        encoded = self.vision_model(pixel_values.to(self.vision_model.config.dtype))
        return BaseModelOutputWithPooling(
            pooler_output=self.project_vision_features(encoded.features, height, width)
        )

    def get_video_features(
        self, pixel_values_videos: Tensor, **_: Any
    ) -> BaseModelOutputWithPooling:  # type: ignore[override]
        raise TypeError("its videos are frames: give each as an image")
