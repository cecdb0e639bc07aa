# SPDX-License-Identifier: Apache-2.0
"""What a run draws from data without records: indexed corpora, made-up samples, streams."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.gpt_dataset import GPTDataset

from megatron.bridge.data.examples import Example
from megatron.bridge.data.fim import FIMDataset

SHOWN_TOKENS = 256


@dataclass(frozen=True)
class CorpusShare:
    """What one corpus gives to a purpose.

    Attributes:
        name: path prefix.
        documents: documents of its part for this purpose.
        tokens: their tokens.
        samples: how many of the run's samples are cut from it.
    """

    name: str
    documents: int
    tokens: int
    samples: int


@dataclass(frozen=True)
class CorpusPreview:
    """The data of one purpose.

    Attributes:
        name: ``train``, ``valid`` or ``test``.
        samples: samples of the run; None where they are not counted (a stream has no end).
        seq_length: tokens of each.
        shares: the corpora; none for made-up data and streams.
    """

    name: str
    samples: int | None
    seq_length: int
    shares: list[CorpusShare]

    def lines(self) -> Iterator[str]:
        """Sentences for people."""
        if self.samples is None:
            yield f"read forwards, {self.seq_length:,} tokens a sample"
            return
        yield f"{self.samples:,} samples x {self.seq_length:,} = {self.samples * self.seq_length:,} tokens"
        for share in self.shares:
            epochs = share.samples * self.seq_length / share.tokens
            yield (
                f"{share.samples / self.samples:.1%} from {share.name}: {epochs:.2f} epochs of its "
                f"{share.documents:,} documents, {share.tokens:,} tokens"
            )


def look_at(name: str, dataset: Any, seq_length: int) -> CorpusPreview:
    """The corpora behind ``dataset``, and how much is drawn from each; nothing of them is read."""
    if not hasattr(dataset, "__len__"):
        return CorpusPreview(name, None, seq_length, [])
    return CorpusPreview(name, len(dataset), seq_length, _shares(dataset))


def _shares(dataset: Any) -> list[CorpusShare]:
    if isinstance(dataset, FIMDataset):
        dataset = dataset.samples
    if isinstance(dataset, BlendedDataset):
        drawn = np.bincount(dataset.dataset_index, minlength=len(dataset.datasets)).tolist()
        return [_share(part, count) for part, count in zip(dataset.datasets, drawn, strict=True)]
    return [_share(dataset, len(dataset))] if isinstance(dataset, GPTDataset) else []


def _share(corpus: Any, samples: int) -> CorpusShare:
    lengths = corpus.dataset.sequence_lengths[corpus.indices]
    return CorpusShare(str(corpus.dataset_path), len(lengths), int(lengths.sum(dtype=np.int64)), samples)


def as_example(row: dict[str, Any]) -> Example:
    """The beginning of a row as a sample: its tokens, and which of them are learnt."""
    tokens = np.concatenate((row["tokens"][:1].numpy(), row["labels"].numpy()))
    trained = np.concatenate((np.zeros(1, np.bool_), row["loss_mask"].numpy() > 0))
    return Example(tokens[:SHOWN_TOKENS], trained[:SHOWN_TOKENS])
