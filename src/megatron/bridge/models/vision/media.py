# SPDX-License-Identifier: Apache-2.0
"""The tensors of a microbatch's images: which belong to which image, and what an image costs.

Two layouts cover all families. *Patches*: ``pixel_values`` has the patches of all images one after another, and a
grid (frames, height, width) for each says how many (Qwen, GLM). *Stacked*: every tensor has one entry per image.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

Media = Mapping[str, Tensor]


def split_kinds(media: Media | None) -> list[Media]:
    """Images and videos apart, images first; nothing of a kind that is not there."""
    media = media or {}
    videos = {name: value for name, value in media.items() if "video" in name}
    images = {name: value for name, value in media.items() if name not in videos}
    return [part for part in (images, videos) if part]


def costs(media: Media) -> list[int]:
    """Patches, or pixels, of each image."""
    grids = _grids(media)
    if grids is not None:
        return [int(size) for size in grids.prod(-1)]
    pixels = next(value for name, value in media.items() if name.startswith("pixel_values"))
    return [int(pixels[0].numel())] * len(pixels)


def select(media: Media, chosen: Sequence[int]) -> dict[str, Tensor]:
    """The same tensors of the chosen images only."""
    grids = _grids(media)
    if grids is None:
        index = torch.tensor(chosen, dtype=torch.long)
        return {name: value[index.to(value.device)] for name, value in media.items()}
    sizes = costs(media)
    picked: dict[str, Tensor] = {}
    for name, value in media.items():
        if name.startswith("pixel_values"):
            parts = value.split(sizes)
            picked[name] = torch.cat([parts[index] for index in chosen])
        else:
            picked[name] = value[list(chosen)]
    return picked


def can_share(media: Media) -> bool:
    """Whether every tensor says which image an entry is of."""
    return _grids(media) is not None or len({len(value) for value in media.values()}) == 1


def _grids(media: Media) -> Tensor | None:
    return next((value for name, value in media.items() if name.endswith("grid_thw")), None)
