# SPDX-License-Identifier: Apache-2.0
"""The smallest image of a tower, encoded where a microbatch has none."""

from typing import Any

import torch
from torch import Tensor


def dummy_media(tower: Any) -> dict[str, Tensor]:
    """Tensors of the smallest image, under the names of transformers' ``get_image_features``."""
    config = tower.config
    if hasattr(tower, "visual"):
        return _patches(config.vision_config)
    size = _size(config)
    pixels = torch.ones(1, getattr(config.vision_config, "num_channels", 3), size, size)
    if config.model_type == "mistral3":  # transformers fails with a single token
        return {"pixel_values": pixels.repeat(1, 1, 1, 2), "image_sizes": torch.tensor([[size, 2 * size]])}
    if config.model_type in ("llava_next", "llava_onevision"):
        return _tiles(config, pixels)
    return {"pixel_values": pixels}


def _patches(vision: Any) -> dict[str, Tensor]:
    merge = vision.spatial_merge_size
    channels = getattr(vision, "in_channels", 3)
    width = channels * vision.temporal_patch_size * vision.patch_size**2
    return {"pixel_values": torch.ones(merge**2, width), "image_grid_thw": torch.tensor([[1, merge, merge]])}


def _size(config: Any) -> int:
    """Pixels along a side."""
    vision = config.vision_config
    if config.model_type == "mistral3":
        return vision.patch_size * config.spatial_merge_size
    return vision.image_size if isinstance(vision.image_size, int) else vision.image_size[0]


def _tiles(config: Any, pixels: Tensor) -> dict[str, Tensor]:
    """A square image, which needs one tile and a copy of the whole at the least."""
    from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

    size = pixels.shape[-1]
    count = image_size_to_num_patches([size, size], config.image_grid_pinpoints, size)
    return {"pixel_values": pixels[:, None].expand(-1, count, -1, -1, -1), "image_sizes": torch.tensor([[size, size]])}
