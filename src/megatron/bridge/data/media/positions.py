# SPDX-License-Identifier: Apache-2.0
"""Positions of multimodal rotary embeddings: time, height and width of every token of a sample.

Text counts on all three axes together. An image lies on a grid of tokens that starts where the text before it
ends, and the text behind it goes on after the longer side of the grid. This is the rule of transformers'
``get_rope_index``, which ignores the length of a video there.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.bridge.utils.errors import UserError

TEXT, IMAGE, VIDEO = 0, 1, 2

Positions = NDArray[np.int64]


def mrope_positions(
    types: Sequence[int] | NDArray[Any],
    image_grids: Sequence[Sequence[int]] | NDArray[Any] = (),
    video_grids: Sequence[Sequence[int]] | NDArray[Any] = (),
    *,
    merge: int,
    time_steps: Sequence[float] | None = None,
    split_frames: bool = False,
) -> Positions:
    """Return positions [3, sequence] of the tokens of one sample.

    Args:
        types: [sequence], 0 for text, 1 for a token of an image, 2 for one of a video.
        image_grids: (frames, height, width) of each image in patches.
        video_grids: the same of each video.
        merge: patches along a side of one token (``spatial_merge_size``).
        time_steps: positions from one frame of each video to the next; 1 when None.
        split_frames: text lies between the frames of a video, so each frame is an image (Qwen3-VL).
    """
    types = np.asarray(types)
    steps = [1.0] * len(video_grids) if time_steps is None else list(time_steps)
    images = iter([(grid, 1.0) for grid in image_grids])
    videos = _frame_grids(video_grids, steps, split_frames)
    positions = np.empty((3, len(types)), dtype=np.int64)
    at = position = 0
    while at < len(types):
        if types[at] == TEXT:
            length = _text_length_at(types, at)
            positions[:, at : at + length] = np.arange(position, position + length)
            position += length
        else:
            kind = int(types[at])
            grid, step = _next_grid(images if kind == IMAGE else videos, kind)
            block = _grid_positions(grid, merge, step)
            length = block.shape[1]
            if (types[at : at + length] != kind).any() or at + length > len(types):
                raise UserError(
                    f"{_NAMES[kind]} with the grid {list(map(int, grid))} needs {length} tokens, the sample has "
                    f"fewer at token {at}: expand each placeholder to the size of its image"
                )
            positions[:, at : at + length] = block + position
            position += max(int(grid[1]), int(grid[2])) // merge
        at += length
    for kind, rest in ((IMAGE, images), (VIDEO, videos)):
        if left := len(list(rest)):
            raise UserError(
                f"{left} more {_NAMES[kind]}s are given than the sample has placeholders for: "
                f"add a placeholder for each, or remove them"
            )
    return positions


_NAMES = {IMAGE: "image", VIDEO: "video"}
_Grids = Iterator[tuple[Any, float]]


def _frame_grids(grids: Any, steps: list[float], split: bool) -> _Grids:
    for grid, step in zip(grids, steps, strict=True):
        if not split:
            yield grid, step
            continue
        for _ in range(int(grid[0])):
            yield (1, grid[1], grid[2]), 1.0


def _text_length_at(types: NDArray[Any], at: int) -> int:
    media = np.flatnonzero(types[at:] != TEXT)
    return int(media[0]) if len(media) else len(types) - at


def _next_grid(grids: _Grids, kind: int) -> tuple[Any, float]:
    grid = next(grids, None)
    if grid is None:
        raise UserError(
            f"the sample has more placeholders for {_NAMES[kind]}s than {_NAMES[kind]}s are given: "
            f"give one {_NAMES[kind]} for each placeholder"
        )
    return grid


def _grid_positions(grid: Any, merge: int, step: float) -> Positions:
    frames = int(grid[0])
    height = int(grid[1]) // merge
    width = int(grid[2]) // merge
    # float32 and then cut off, as transformers does
    time = (np.arange(frames) * np.float32(step)).astype(np.int64)
    return np.stack(np.meshgrid(time, np.arange(height), np.arange(width), indexing="ij")).reshape(
        3, -1
    )
