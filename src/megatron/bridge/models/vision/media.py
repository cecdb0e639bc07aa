# SPDX-License-Identifier: Apache-2.0
"""The tensors of a microbatch's images and recordings: which image each entry belongs to, and the cost of an image.

Two layouts cover all families. *Patches*: ``pixel_values`` concatenates the patches of all images, and a grid for each
image (frames, height, width, or without frames) gives their number (Qwen, GLM, Nemotron). *Stacked*: every tensor has
one entry per image or stretch of sound, or, for a single video, one per frame (Nemotron).
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

Media = Mapping[str, Tensor]


AUDIO_TENSORS = ("input_features", "feature_attention_mask")
"""Names of what transformers' audio towers take."""


def split_kinds(media: Media | None) -> list[Media]:
    """Images, videos and audio separately, in this order; kinds that do not occur are left out."""
    media = media or {}
    audio = {name: value for name, value in media.items() if name.startswith(AUDIO_TENSORS)}
    videos = {name: value for name, value in media.items() if "video" in name}
    images = {
        name: value for name, value in media.items() if name not in videos and name not in audio
    }
    return [part for part in (images, videos, audio) if part]


def is_audio(media: Media) -> bool:
    return any(name.startswith(AUDIO_TENSORS) for name in media)


def costs(media: Media) -> list[int]:
    """Patches, pixels or numbers of a spectrogram, of each image or stretch of sound."""
    grids = _find_grids(media)
    if grids is not None:
        return [int(size) for size in grids.prod(-1)]
    values = next(
        value
        for name, value in media.items()
        if name.startswith(("pixel_values", AUDIO_TENSORS[0]))
    )
    return [int(values[0].numel())] * len(values)


def select(media: Media, chosen: Sequence[int]) -> dict[str, Tensor]:
    """The tensors of the chosen images only; the patches may be only theirs already."""
    grids = _find_grids(media)
    if grids is None:
        index = torch.tensor(chosen, dtype=torch.long)
        return {name: value[index.to(value.device)] for name, value in media.items()}
    sizes = costs(media)
    picked: dict[str, Tensor] = {}
    for name, value in media.items():
        if name.startswith("pixel_values"):
            alone = len(value) == sum(sizes[index] for index in chosen)
            parts = value.split(sizes) if not alone else ()
            picked[name] = value if alone else torch.cat([parts[index] for index in chosen])
        else:
            picked[name] = value[list(chosen)]
    return picked


def share_out(costs: Sequence[int], ranks: int) -> list[int]:
    """The rank of each image: the most expensive first, each to the rank with the least work.

    Example:
        >>> share_out([1, 5, 2, 3], 2)
        [0, 0, 1, 1]
        >>> share_out([1, 1, 1, 1], 2)
        [0, 0, 1, 1]
    """
    if (
        len(set(costs)) == 1
    ):  # such as tiles: in blocks, so that the tiles of an image stay together
        return [index * ranks // len(costs) for index in range(len(costs))]
    work = [0] * ranks
    owners = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        owners[index] = min(range(ranks), key=lambda rank: (work[rank], rank))
        work[owners[index]] += costs[index]
    return owners


def can_share(media: Media) -> bool:
    """Whether every tensor says which image an entry is of."""
    if any("video" in name and value.dim() == 4 for name, value in media.items()):
        return False  # frames
    return _find_grids(media) is not None or len({len(value) for value in media.values()}) == 1


def _find_grids(media: Media) -> Tensor | None:
    return next(
        (value for name, value in media.items() if name.endswith(("grid_thw", "grid_hw"))), None
    )
