# SPDX-License-Identifier: Apache-2.0
"""What a vision-language family declares to be tested."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.bridge.models.vision.merge import look_ahead, prompt_look_ahead
from tests.families.row import Row
from tests.families.vision.samples import (
    IMAGE_TOKEN,
    LENGTH,
    VIDEO_TOKEN,
    Maker,
    Sample,
    make_sample,
)

Media = dict[str, Tensor]


@dataclass(frozen=True)
class VisionRow(Row):
    """A row whose samples have images.

    Attributes:
        image: makes an image; the number chooses one of three sizes.
        video: makes a video; None where the family has none.
        mrope: arguments of ``mrope_positions``; None where positions have one axis.
        types_as: the argument by which transformers is told what each token is; nothing if empty.
        for_transformers: a sample's tensors as transformers' forward takes them.
        for_model: the same as the bridged model takes them.
        encoded: what transformers' forward is given, if its own way from tensors to features fails.
    """

    image: Maker = None  # type: ignore[assignment]
    video: Maker | None = None
    mrope: dict[str, Any] | None = None
    types_as: str = ""
    for_transformers: Callable[[Media], Media] = dict
    for_model: Callable[[Media], Media] = dict
    encoded: Callable[[Any, Media], dict[str, Any]] | None = None
    mixes: bool = True
    """A sample may have both an image and a video."""
    carried: tuple[str, ...] = ()
    """How names of tensors begin that are carried along."""
    looks_ahead: bool = False
    """The tokens of an image or a frame see each other both ways, besides Gemma 3, which ``types_as`` tells."""
    prompt: int = 0
    """Tokens at the beginning of a sample that see each other both ways."""

    def types(self, sample: Sample) -> Tensor:
        """What transformers is told about each token."""
        if self.prompt:
            return (torch.arange(LENGTH) >= self.prompt).long()[None]
        return sample.types

    def sight(self, sample: Sample) -> Tensor | None:
        """How many tokens each token sees ahead; None where attention is causal."""
        if self.prompt:
            return prompt_look_ahead(
                (torch.arange(LENGTH) >= self.prompt - 1).float()[None], [0, LENGTH]
            )
        if self.looks_ahead or self.types_as == "token_type_ids":
            return look_ahead(sample.ids, IMAGE_TOKEN, VIDEO_TOKEN)
        return None

    def samples(self, config: Any) -> list[Sample]:
        """One image, two of different sizes, none, a video, and both."""
        generator = torch.Generator().manual_seed(11)
        image, video = self.image, self.video
        contents = [[(image, 1)], [(image, 0), (image, 2)], [], [(image, 2)]]
        if video:
            contents[3] = [(video, 0)]
            contents += [[(video, 1), (image, 0)], []] if self.mixes else []
        return [
            make_sample(config, [make(config, which, generator) for make, which in pieces], seed)
            for seed, pieces in enumerate(contents)
        ]
