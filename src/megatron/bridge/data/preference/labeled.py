# SPDX-License-Identifier: Apache-2.0
"""From records of one answer, which is desirable or not, to rows for KTO.

A record holds ``prompt`` and ``completion``, both texts or both lists of messages, and ``label``, which is true or
false.
"""

from collections.abc import Sequence

import numpy as np
import torch

from megatron.bridge.data.finetuning.rows import Row, SampleRows, make_row
from megatron.bridge.data.preference.pairs import PairEncoder
from megatron.bridge.data.records.encoding import EncodedRecords, RecordEncoder
from megatron.bridge.data.records.formats import Record
from megatron.bridge.data.records.samples import EncodingReport, Sample, Samples
from megatron.bridge.data.records.sources import LocatedRecord
from megatron.bridge.utils.errors import UserError

KEYS = ("prompt", "completion", "label")


class LabeledEncoder(PairEncoder):
    """Tokenizes answers. The label of an answer is kept as one more token, 1 or 0."""

    def __call__(self, records: Sequence[LocatedRecord]) -> EncodedRecords:
        encoded = super().__call__(records)
        encoded.report.tokens -= encoded.report.samples  # labels are not text
        return encoded

    def _pair(self, where: str, record: Record, report: EncodingReport) -> Sequence[Sample]:
        missing = [name for name in KEYS if record.get(name) is None]
        if missing:
            raise UserError(
                f"{where}: {' and '.join(missing)} is missing: a record for dpo.loss_type=kto has prompt, "
                f"completion and label (keys: {', '.join(sorted(record))})"
            )
        label = record["label"]
        if not isinstance(label, bool):
            raise UserError(f"{where}: label={label!r} must be true (desirable) or false: correct it")
        answer = {key: value for key, value in record.items() if key != "label"}
        samples, found = RecordEncoder.__call__(self, [(where, answer)])
        report.add(found)
        return [
            Sample(np.append(sample.tokens, np.int32(label)), np.append(sample.trained, False)) for sample in samples
        ]


class LabeledSamples(Samples):
    """The samples of ``LabeledEncoder``, without the token that is their label."""

    def __init__(self, samples: Samples) -> None:
        super().__init__(samples.tokens, samples.trained, samples.bounds)

    def __getitem__(self, index: int) -> Sample:  # pyright: ignore[reportIncompatibleMethodOverride] - no slices
        sample = super().__getitem__(index)
        return Sample(sample.tokens[:-1], sample.trained[:-1])

    def label(self, index: int) -> bool:
        return bool(super().__getitem__(index).tokens[-1])

    @property
    def lengths(self) -> np.ndarray:
        return super().lengths - 1


class LabeledRows(SampleRows):
    """One answer in each row, and behind it the same prompt with the answer to another prompt.

    The second sequence is for the estimate of KL. It takes the answer of the next sample that has another prompt.

    ``samples`` are those of ``LabeledEncoder``; second sequences are cut to ``longest`` tokens, and each sequence is
    padded to a multiple of ``multiple``.
    """

    def __init__(self, samples: Samples, padding: int, longest: int, multiple: int = 1) -> None:
        self.answers, self.longest = LabeledSamples(samples), longest
        super().__init__(self.answers, None, padding, multiple)
        self._mismatched(0)

    def __getitem__(self, index: int) -> Row:
        sequences = [self.answers[index], self._mismatched(index)]
        row = make_row(sequences, self.padding, self.multiple, None, self.has_cu_seqlens)
        row["desirable"] = torch.full_like(row["loss_mask"], float(self.answers.label(index)))
        return row

    def titles(self, count: int) -> list[str]:
        labels = [self.answers.label(place) for place in range(min(count, len(self)))]
        return [
            f"sample {number}, {'desirable' if label else 'undesirable'}"
            for number, label in enumerate(labels, start=1)
        ]

    def _mismatched(self, index: int) -> Sample:
        prompt, _ = _split(self.answers[index])
        others = (self.answers[(index + step) % len(self)] for step in range(1, len(self)))
        for other_prompt, answer in map(_split, others):
            if not np.array_equal(prompt.tokens, other_prompt.tokens):
                tokens, trained = map(np.concatenate, zip(prompt[:2], answer[:2], strict=True))
                return Sample(tokens[: self.longest], trained[: self.longest])
        raise UserError(
            f"dpo.loss_type=kto compares prompts with the answers to other prompts, but the {len(self)} records "
            "of a split have one prompt: add records with other prompts"
        )


def _split(sample: Sample) -> tuple[Sample, Sample]:
    """The tokens before the first one in the loss, and the others."""
    first = int(np.argmax(sample.trained))
    return (
        Sample(sample.tokens[:first], sample.trained[:first]),
        Sample(sample.tokens[first:], sample.trained[first:]),
    )
