# SPDX-License-Identifier: Apache-2.0
"""Conversations about generated audio, for tests and benchmarks."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np

from megatron.bridge.data.dataset_config import SPLITS, Split, too_small
from megatron.bridge.data.finetuning.sft_config import SFTDatasetConfig
from megatron.bridge.data.records.sources import LocatedRecord
from megatron.bridge.utils.config.ranges import SEED

PITCHES = {"low": 220.0, "middle": 880.0, "high": 2640.0}
"""Answers, and the hertz of the tones that they name."""
RATE = 16_000


@dataclass(kw_only=True)
class MockAudioConversationProvider(SFTDatasetConfig):
    """Tones in noise; the answers say whether they are low, middle or high, so a model can learn them."""

    prompt: str = "How high is this tone?"  # the question about the recordings
    random_seed: Annotated[int, SEED] = 0  # seed of the recordings
    seconds: float = 2.0  # of a recording
    num_recordings: int = 1  # recordings of a sample
    num_samples: int = 64  # different samples of a split

    def problems(self) -> list[str]:
        problems = [*super().problems(), *too_small(self, "num_samples")]
        if self.num_recordings < 0:
            problems.append(f"dataset.num_recordings={self.num_recordings}: it cannot be negative")
        if not 0.05 <= self.seconds <= 30:
            problems.append(
                f"dataset.seconds={self.seconds}: a recording has at least 0.05 and at most 30 seconds"
            )
        return problems

    def source(self, split: Split) -> "MockAudioSource":
        seed = (self.random_seed, SPLITS.index(split))
        return MockAudioSource(
            self.prompt, seed, self.seconds, self.num_recordings, self.num_samples
        )


@dataclass(frozen=True)
class MockAudioSource:
    prompt: str
    seed: tuple[int, int]
    seconds: float
    num_recordings: int
    num_samples: int

    name: ClassVar[str] = "generated tones"

    def records(self) -> Iterator[LocatedRecord]:
        for index in range(self.num_samples):
            rng = np.random.default_rng((*self.seed, index))
            yield f"{self.name}: {index + 1}", self._record(rng)

    def fingerprint(self) -> str:
        return repr(self)

    def _record(self, rng: np.random.Generator) -> dict[str, Any]:
        chosen = rng.choice(list(PITCHES), size=self.num_recordings).tolist()
        recordings = [
            {"type": "audio", "array": self._tone(rng, PITCHES[name]), "sampling_rate": RATE}
            for name in chosen
        ]
        question = [*recordings, {"type": "text", "text": self.prompt}]
        answer = ", ".join(chosen) or "There is no tone."
        return {
            "messages": [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]
        }

    def _tone(self, rng: np.random.Generator, hertz: float) -> np.ndarray:
        times = np.arange(round(self.seconds * RATE)) / RATE
        noise = 0.05 * rng.standard_normal(len(times))
        return (0.3 * np.sin(2 * np.pi * hertz * times) + noise).astype(np.float32)
