# SPDX-License-Identifier: Apache-2.0
"""From records of preferences to pairs of tokenized answers.

A record holds ``prompt``, ``chosen`` and ``rejected``, all texts or all lists of messages; or ``chosen`` and
``rejected`` alone, two lists of messages that begin alike. Other keys, such as ``tools``, go with both answers.
"""

from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any

from megatron.bridge.data.finetuning.rows import SampleRows
from megatron.bridge.data.records.encoding import Draft, EncodedRecords, RecordEncoder
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
        report, kept = EncodingReport(), list[Sample]()
        for where, record in super()._processed(records, report):
            kept += self._pair(where, record, report)
        samples = Samples.of(kept)
        report.records, report.samples = len(records), len(samples)
        report.tokens, report.trained = len(samples.tokens), int(samples.trained.sum())
        return EncodedRecords(samples, report)

    def _processed(self, records: Sequence[LocatedRecord], report: EncodingReport) -> Iterator[LocatedRecord]:
        yield from records  # answers of a pair, which has been processed as a whole

    def _pair(self, where: str, record: Record, report: EncodingReport) -> Sequence[Sample]:
        if record.get("chosen") == record.get("rejected") is not None:
            report.drop(EQUAL, where)
            return []
        answers = [(f"{where}: {name}", answer) for name, answer in split_pair(record, where).items()]
        return self._both(answers, where, report)

    def _both(self, texts: Sequence[LocatedRecord], where: str, report: EncodingReport) -> Sequence[Sample]:
        """The samples of two texts; none if one of them is dropped."""
        samples, found = super().__call__(texts)
        report.add(found)
        if len(samples) == len(ANSWERS):
            return samples
        report.drop(INCOMPLETE, where)
        return []

    def _keep(self, draft: Draft, report: EncodingReport) -> bool:
        length, limit = len(draft.sample.tokens) - 1, self.rules.max_tokens - 1
        if self.rules.truncation == "refuse" and length > limit:
            raise UserError(
                f"{draft.where}: the answer and its prompt have {length} tokens, more than {limit}, half of "
                f"dataset.seq_length: increase it, or set dataset.truncation to drop, right, left or keep_answer"
            )
        return super()._keep(draft, report)


def split_pair(record: Record, where: str) -> dict[str, dict[str, Any]]:
    """The record of each answer, with ``prompt`` and ``completion``."""
    missing = [name for name in ANSWERS if record.get(name) is None]
    if missing:
        raise UserError(
            f"{where}: {' and '.join(missing)} is missing: a pair has prompt, chosen and rejected, or lists of "
            f"messages chosen and rejected (keys: {', '.join(sorted(record))})"
        )
    prompt, begin = _prompt(record, where)
    rest = {key: value for key, value in record.items() if key not in ("prompt", *ANSWERS)}
    return {
        name: {**rest, "prompt": prompt, "completion": record[name][begin:] if begin else record[name]}
        for name in ANSWERS
    }


def _prompt(record: Record, where: str) -> tuple[Any, int]:
    """The prompt, and where each answer begins in its key."""
    if record.get("prompt") is not None:
        return record["prompt"], 0
    chosen, rejected = (expect(record[name], "a list", where, f"{name} without a prompt") for name in ANSWERS)
    both = zip(chosen, rejected, strict=False)
    shared = [message for message, _ in takewhile(lambda pair: pair[0] == pair[1], both)]
    if not shared:
        raise UserError(f"{where}: chosen and rejected do not begin with the same message: give the key prompt")
    return shared, len(shared)


class PairRows(SampleRows):
    """One pair in each row, without padding. The rows of a microbatch are concatenated."""

    def __init__(self, samples: Samples, padding: int, multiple: int = 1, names: tuple[str, str] = ANSWERS) -> None:
        super().__init__(samples, None, padding, multiple)
        self._names = names

    def __len__(self) -> int:
        return len(self.samples) // len(ANSWERS)

    def titles(self, count: int) -> list[str]:
        return [f"pair {place + 1}, {name}" for place in range(min(count, len(self))) for name in self._names]

    def _places(self, index: int) -> list[int]:
        return [2 * index, 2 * index + 1]
