# SPDX-License-Identifier: Apache-2.0
"""Conversations about generated pictures, for tests and benchmarks."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from megatron.bridge.data.dataset_config import SPLITS, Split, too_small
from megatron.bridge.data.finetuning.sft_config import SFTDatasetConfig
from megatron.bridge.data.records.sources import LocatedRecord

if TYPE_CHECKING:
    from PIL import Image

COLORS = ("red", "green", "blue")


@dataclass(kw_only=True)
class MockVLMConversationProvider(SFTDatasetConfig):
    """Pictures of noise in which one color is stronger; the answers name it, so a model can learn them."""

    prompt: str = "Describe this image."  # the question about the images
    random_seed: int = 0  # seed of the pictures
    image_size: tuple[int, int] = (256, 256)  # width and height in pixels
    num_images: int = 1  # images of a sample
    num_samples: int = 64  # different samples of a split

    def problems(self) -> list[str]:
        found = [*super().problems(), *too_small(self, "num_samples")]
        if self.num_images < 0:
            found.append(f"dataset.num_images={self.num_images}: it cannot be negative")
        if min(self.image_size) < 1:
            found.append(f"dataset.image_size={self.image_size}: both sides must be at least 1")
        return found

    def source(self, split: Split) -> "MockImageSource":
        seed = (self.random_seed, SPLITS.index(split))
        return MockImageSource(self.prompt, seed, self.image_size, self.num_images, self.num_samples)


@dataclass(frozen=True)
class MockImageSource:
    """The records of a split."""

    prompt: str
    seed: tuple[int, int]
    image_size: tuple[int, int]
    num_images: int
    num_samples: int

    name: ClassVar[str] = "generated pictures"

    def records(self) -> Iterator[LocatedRecord]:
        for index in range(self.num_samples):
            yield f"{self.name}: {index + 1}", self._record(np.random.default_rng((*self.seed, index)))

    def fingerprint(self) -> str:
        return repr(self)

    def _record(self, rng: np.random.Generator) -> dict[str, Any]:
        chosen = rng.integers(len(COLORS), size=self.num_images).tolist()
        images = [{"type": "image", "image": self._picture(rng, color)} for color in chosen]
        question = [*images, {"type": "text", "text": self.prompt}]
        answer = ", ".join(COLORS[color] for color in chosen) or "There is no image."
        return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}

    def _picture(self, rng: np.random.Generator, color: int) -> "Image.Image":
        from PIL import Image

        width, height = self.image_size
        pixels = rng.integers(0, 128, (height, width, 3), dtype=np.uint8)
        pixels[..., color] += 127
        return Image.fromarray(pixels)
