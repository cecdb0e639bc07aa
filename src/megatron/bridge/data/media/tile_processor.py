# SPDX-License-Identifier: Apache-2.0
"""The image processor of Nemotron Nano VL v2, which is remote code of its checkpoint."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from megatron.bridge.utils.errors import UserError

if TYPE_CHECKING:
    from PIL import Image

_DEFAULTS = {"max_num_tiles": 12, "use_thumbnail": True, "patch_size": 16, "downsample_ratio": 0.5}


class TileProcessor:
    """Splits an image into a grid of tiles with the closest aspect ratio, followed by the full image as one tile.

    This is what the remote code of Nemotron Nano VL v2 computes, which need not run.
    """

    def __init__(self, values: Mapping[str, Any], path: str) -> None:
        self.values: dict[str, Any] = {
            "image_size": values.get("force_image_size", 512),
            **_DEFAULTS,
        }
        self.values |= {
            key: values[key] for key in (*self.values, "norm_mean", "norm_std") if key in values
        }
        if missing := sorted({"norm_mean", "norm_std"} - self.values.keys()):
            raise UserError(
                f"{path}: preprocessor_config.json has no {missing[0]}: download it again"
            )

    def to_dict(self) -> dict[str, Any]:
        return self.values

    def count(self, height: int, width: int) -> int:
        """Tiles of an image of this size."""
        rows, columns = self._grid(height, width)
        return rows * columns + (self.values["use_thumbnail"] and rows * columns > 1)

    @property
    def tokens(self) -> int:
        return int(
            (
                self.values["image_size"]
                // self.values["patch_size"]
                * self.values["downsample_ratio"]
            )
            ** 2
        )

    def __call__(self, image: "Image.Image", return_tensors: str = "pt") -> dict[str, Tensor]:
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None] / 255
        (rows, columns), side = self._grid(image.height, image.width), self.values["image_size"]
        grid = _resize_image(pixels, rows * side, columns * side)[0]
        tiles = (
            grid.unflatten(2, (columns, side))
            .unflatten(1, (rows, side))
            .permute(1, 3, 0, 2, 4)
            .flatten(0, 1)
        )
        if len(tiles) < self.count(image.height, image.width):
            tiles = torch.cat((tiles, _resize_image(pixels, side, side)))
        mean, deviation = (
            torch.tensor(self.values[key]).view(3, 1, 1) for key in ("norm_mean", "norm_std")
        )
        return {"pixel_values": (tiles - mean) / deviation}

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns."""
        from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import (
            get_optimal_tiled_canvas,
        )

        tile = (self.values["image_size"],) * 2
        columns, rows = get_optimal_tiled_canvas(
            (height, width), tile, 1, self.values["max_num_tiles"]
        )
        return rows, columns


def _resize_image(image: Tensor, height: int, width: int) -> Tensor:
    return interpolate(image, (height, width), mode="bicubic", align_corners=False, antialias=True)
