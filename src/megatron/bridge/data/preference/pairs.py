# SPDX-License-Identifier: Apache-2.0
"""From preference records to pairs of tokenized answers, and from labeled records to rows for KTO.

A record of a pair holds ``prompt``, ``chosen`` and ``rejected``, all texts or all lists of messages; or only ``chosen``
and ``rejected``, two lists of messages with the same beginning. Other keys, such as ``tools``, apply to both answers. A
labeled record holds ``prompt`` and ``completion``, both texts or both lists of messages, and ``label``, which is true
(desirable) or false.
"""

from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any

import numpy as np
import torch

from megatron.bridge.data.finetuning.rows import Row, SampleRows, make_row
from megatron.bridge.data.records.encoding import EncodedRecord, EncodedRecords, RecordEncoder
from megatron.bridge.data.records.formats import Record, expect
from megatron.bridge.data.records.samples import EncodingReport, Sample, Samples
from megatron.bridge.data.records.sources import LocatedRecord
from megatron.bridge.utils.errors import UserError

ANSWERS = ("chosen", "rejected")
INCOMPLETE = "as pairs without one of their answers"
EQUAL = "as pairs of equal answers"


class PairEncoder(RecordEncoder):
    """Tokenizes pairs. A pair is two samples, the chosen answer first; both are kept, or none."""

    def __call__(self, records: Sequence[LocatedRecord]) -> EncodedRecords:
        report = EncodingReport()
        encoded = list[Sample]()
        for location, record in super()._processed(records, report):
            encoded += self._pair(location, record, report)
        samples = Samples.of(encoded)
        report.records = len(records)
        report.samples = len(samples)
        report.tokens = len(samples.tokens)
        report.trained = int(samples.trained.sum())
        return EncodedRecords(samples, report)

    def _processed(
        self, records: Sequence[LocatedRecord], report: EncodingReport
    ) -> Iterator[LocatedRecord]:
        yield from records  # answers of a pair, which has been processed as a whole

    def _pair(self, location: str, record: Record, report: EncodingReport) -> Sequence[Sample]:
        if record.get("chosen") == record.get("rejected") is not None:
            report.drop(EQUAL, location)
            return []
        answers = [
            (f"{location}: {name}", answer) for name, answer in split_pair(record, location).items()
        ]
        return self._together(answers, location, report)

    def _together(
        self, texts: Sequence[LocatedRecord], location: str, report: EncodingReport
    ) -> Sequence[Sample]:
        """The samples of the texts of a record; none if one of them is dropped."""
        samples, pair_report = super().__call__(texts)
        report.add(pair_report)
        if len(samples) == len(texts):
            return samples
        report.drop(INCOMPLETE, location)
        return []

    def _keep(self, draft: EncodedRecord, report: EncodingReport) -> bool:
        length = len(draft.sample.tokens) - 1
        limit = self.rules.max_tokens - 1
        if self.rules.truncation == "refuse" and length > limit:
            raise UserError(
                f"{draft.where}: the answer and its prompt have {length} tokens, more than {limit}, its part of "
                f"dataset.seq_length: increase it, or set dataset.truncation to drop, right, left or keep_answer"
            )
        return super()._keep(draft, report)


def split_pair(record: Record, location: str) -> dict[str, dict[str, Any]]:
    """The record of each answer, with ``prompt`` and ``completion``."""
    _require_keys(
        record,
        ANSWERS,
        location,
        "a pair has prompt, chosen and rejected, or lists of messages chosen and rejected",
    )
    prompt, begin = _common_prompt(record, location)
    rest = {key: value for key, value in record.items() if key not in ("prompt", *ANSWERS)}
    return {
        name: {
            **rest,
            "prompt": prompt,
            "completion": record[name][begin:] if begin else record[name],
        }
        for name in ANSWERS
    }


def _require_keys(record: Record, keys: Sequence[str], location: str, rule: str) -> None:
    if missing := [name for name in keys if record.get(name) is None]:
        names = ", ".join(sorted(record))
        raise UserError(f"{location}: {' and '.join(missing)} is missing: {rule} (keys: {names})")


def _common_prompt(record: Record, location: str) -> tuple[Any, int]:
    """The prompt, and where each answer begins in its key."""
    if record.get("prompt") is not None:
        return record["prompt"], 0
    chosen, rejected = (
        expect(record[name], "a list", location, f"{name} without a prompt") for name in ANSWERS
    )
    both = zip(chosen, rejected, strict=False)
    shared = [message for message, _ in takewhile(lambda pair: pair[0] == pair[1], both)]
    if not shared:
        raise UserError(
            f"{location}: chosen and rejected do not begin with the same message: give the key prompt"
        )
    return shared, len(shared)


class PairRows(SampleRows):
    """One pair, or group of texts, in each row, without padding. The rows of a microbatch are concatenated."""

    def __init__(
        self, samples: Samples, padding: int, multiple: int = 1, names: tuple[str, ...] = ANSWERS
    ) -> None:
        super().__init__(samples, None, padding, multiple)
        self._names = names

    def __len__(self) -> int:
        return len(self.samples) // len(self._names)

    def titles(self, count: int) -> list[str]:
        return [
            f"pair {index + 1}, {name}"
            for index in range(min(count, len(self)))
            for name in self._names
        ]

    def _places(self, index: int) -> list[int]:
        count = len(self._names)
        return list(range(count * index, count * (index + 1)))


KEYS = ("prompt", "completion", "label")


class LabeledEncoder(PairEncoder):
    """Tokenizes answers. The label of an answer is kept as one more token, 1 or 0."""

    def __call__(self, records: Sequence[LocatedRecord]) -> EncodedRecords:
        encoded = super().__call__(records)
        encoded.report.tokens -= encoded.report.samples  # labels are not text
        return encoded

    def _pair(self, location: str, record: Record, report: EncodingReport) -> Sequence[Sample]:
        _require_keys(
            record,
            KEYS,
            location,
            "a record for dpo.loss_type=kto has prompt, completion and label",
        )
        label = record["label"]
        if not isinstance(label, bool):
            raise UserError(
                f"{location}: label={label!r} must be true (desirable) or false: correct it"
            )
        answer = {key: value for key, value in record.items() if key != "label"}
        samples, sample_report = RecordEncoder.__call__(self, [(location, answer)])
        report.add(sample_report)
        return [
            Sample(np.append(sample.tokens, np.int32(label)), np.append(sample.trained, False))
            for sample in samples
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
    """One answer in each row, followed by the same prompt with the answer to another prompt.

    The second sequence is for the KL estimate. It takes the answer of the next sample that has another prompt.
    ``samples`` are those of ``LabeledEncoder``; second sequences are truncated to ``longest`` tokens, and each sequence
    is padded to a multiple of ``multiple``.
    """

    def __init__(self, samples: Samples, padding: int, longest: int, multiple: int = 1) -> None:
        self.answers = LabeledSamples(samples)
        self.longest = longest
        super().__init__(self.answers, None, padding, multiple)
        self._mismatched(0)

    def __getitem__(self, index: int) -> Row:
        sequences = [self.answers[index], self._mismatched(index)]
        row = make_row(sequences, self.padding, self.multiple, None, self.has_cu_seqlens)
        row["desirable"] = torch.full_like(row["loss_mask"], float(self.answers.label(index)))
        return row

    def titles(self, count: int) -> list[str]:
        labels = [self.answers.label(index) for index in range(min(count, len(self)))]
        return [
            f"sample {position}, {'desirable' if label else 'undesirable'}"
            for position, label in enumerate(labels, start=1)
        ]

    def _mismatched(self, index: int) -> Sample:
        prompt, _ = _split_prompt(self.answers[index])
        candidates = (self.answers[(index + step) % len(self)] for step in range(1, len(self)))
        for other_prompt, answer in map(_split_prompt, candidates):
            if not np.array_equal(prompt.tokens, other_prompt.tokens):
                tokens, trained = map(np.concatenate, zip(prompt[:2], answer[:2], strict=True))
                return Sample(tokens[: self.longest], trained[: self.longest])
        raise UserError(
            f"dpo.loss_type=kto compares prompts with the answers to other prompts, but the {len(self)} records "
            "of a split have one prompt: add records with other prompts"
        )


def _split_prompt(sample: Sample) -> tuple[Sample, Sample]:
    """The tokens before the first one in the loss, and the others."""
    first = int(np.argmax(sample.trained))
    return (
        Sample(sample.tokens[:first], sample.trained[:first]),
        Sample(sample.tokens[first:], sample.trained[first:]),
    )
