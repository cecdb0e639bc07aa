# SPDX-License-Identifier: Apache-2.0
"""The preview of data without records: indexed corpora, mock data and streams."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.gpt_dataset import GPTDataset

from megatron.bridge.data.pretraining.fim_dataset import FIMDataset


@dataclass(frozen=True)
class CorpusShare:
    """What a split draws from one corpus."""

    name: str  # path prefix
    documents: int  # documents of the corpus that belong to the split
    tokens: int
    samples: int  # samples of the run that are cut from them


@dataclass(frozen=True)
class CorpusPreview:
    """The data of one split."""

    name: str  # ``train``, ``valid`` or ``test``
    samples: int | None  # samples of the run; None for a stream, which has no end
    seq_length: int
    shares: list[CorpusShare]  # the corpora; empty for mock data and streams

    def lines(self) -> Iterator[str]:
        """The preview for people, one sentence each."""
        if self.samples is None:
            yield f"a stream of samples with {self.seq_length:,} tokens each"
            return
        yield f"{self.samples:,} samples x {self.seq_length:,} = {self.samples * self.seq_length:,} tokens"
        for share in self.shares:
            epochs = share.samples * self.seq_length / share.tokens
            yield (
                f"{share.samples / self.samples:.1%} from {share.name}: {epochs:.2f} epochs of its "
                f"{share.documents:,} documents, {share.tokens:,} tokens"
            )


def preview_corpora(name: str, dataset: Any, seq_length: int) -> CorpusPreview:
    """The corpora behind ``dataset``, and how much is drawn from each. This reads no samples."""
    if not hasattr(dataset, "__len__"):
        return CorpusPreview(name, None, seq_length, [])
    return CorpusPreview(name, len(dataset), seq_length, _shares(dataset))


def _shares(dataset: Any) -> list[CorpusShare]:
    if isinstance(dataset, FIMDataset):
        dataset = dataset.dataset
    if isinstance(dataset, BlendedDataset):
        drawn = np.bincount(dataset.dataset_index, minlength=len(dataset.datasets)).tolist()
        return [_share(part, count) for part, count in zip(dataset.datasets, drawn, strict=True)]
    return [_share(dataset, len(dataset))] if isinstance(dataset, GPTDataset) else []


def _share(corpus: Any, samples: int) -> CorpusShare:
    lengths = corpus.dataset.sequence_lengths[corpus.indices]
    return CorpusShare(str(corpus.dataset_path), len(lengths), int(lengths.sum(dtype=np.int64)), samples)
