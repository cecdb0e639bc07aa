# SPDX-License-Identifier: Apache-2.0
"""Rotary embeddings of three positions: each frequency turns with time, height or width."""

from typing import Any

import torch
from torch import Tensor, nn

from megatron.bridge.utils.errors import UserError


class MultimodalRotary(nn.Module):
    """Angles of three-dimensional positions, with the frequencies of a one-dimensional embedding.

    Megatron-Core's own class has no interleaved sections, and slices packed rows wrongly under context
    parallelism. Here, positions of a packed row are those of the whole row, from which Megatron-Core takes each
    rank's part; those of other rows are already this rank's.

    ``sections`` are how many frequencies belong to time, height and width. ``interleaved`` axes take turns, as in
    Qwen3-VL; else each has a block of frequencies.
    """

    def __init__(self, plain: Any, sections: list[int], interleaved: bool) -> None:
        super().__init__()
        count = len(plain.inv_freq)
        if len(sections) != 3 or (sum(sections) != count):
            raise UserError(
                f"mrope_section={sections} must be three numbers that sum up to {count}, half of the rotated head "
                "dimensions"
            )
        self.inv_freq: Tensor = plain.inv_freq
        self.pairs = bool(plain.rotary_interleaved)
        self.axes = axes_of(sections, interleaved)

    def forward(self, position_ids: Tensor, *_: Any, **__: Any) -> Tensor:
        """Angles [s, b, 1, rotated dimension] of positions [3, b, s], or [b, s] where the axes are equal."""
        if position_ids.dim() == 2:
            position_ids = position_ids.expand(3, *position_ids.shape)
        chosen = position_ids[self.axes.to(position_ids.device)]
        angles = chosen.permute(2, 1, 0).float() * self.inv_freq.to(chosen.device)
        both = torch.stack((angles, angles), dim=-1).flatten(-2) if self.pairs else torch.cat((angles, angles), -1)
        return both[:, :, None]


def axes_of(sections: list[int], interleaved: bool) -> Tensor:
    """The axis (0 time, 1 height, 2 width) of each frequency.

    Example:
        >>> axes_of([1, 1, 2], interleaved=False).tolist()
        [0, 1, 2, 2]
        >>> axes_of([3, 1, 1], interleaved=True).tolist()
        [0, 1, 2, 0, 0]
    """
    axes = [axis for axis, count in enumerate(sections) for _ in range(count)]
    if interleaved:
        turns = {place: axis for axis in (1, 2) for place in range(axis, 3 * sections[axis], 3)}
        axes = [turns.get(place, 0) for place in range(sum(sections))]
    return torch.tensor(axes, device="cpu")  # numbers, even while the model is built on the meta device
