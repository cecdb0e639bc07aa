# SPDX-License-Identifier: Apache-2.0
"""From records to samples whose only target stands behind the last token: a class, or a place holder.

A row's position i predicts token i + 1 of its sample. So a class is kept as one more token, and rows, packing and
context parallelism need not know of it.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from megatron.bridge.data.labels.label_rules import LabelRules
from megatron.bridge.data.preference.pairs import PairEncoder
from megatron.bridge.data.records.encoding import Draft, EncodedRecords, RecordEncoder
from megatron.bridge.data.records.formats import PromptCompletion, Record, Text
from megatron.bridge.data.records.samples import EncodingReport, Sample
from megatron.bridge.data.records.sources import LocatedRecord
from megatron.bridge.data.records.truncation import shorten
from megatron.bridge.utils.errors import UserError

TEXTS = ("query", "positive")
_PLACE_HOLDER = 0


class TargetAtEnd(RecordEncoder):
    """Keeps all tokens of a text as inputs, and its target as one more token."""

    def target(self, where: str) -> int:
        del where
        return _PLACE_HOLDER

    def _plain(self, parsed: Sequence[PromptCompletion | Text]) -> Iterator[Sample]:
        for sample in super()._plain(parsed):
            yield Sample(sample.tokens[:-1], sample.trained[:-1])  # without the end-of-document token

    def _keep(self, draft: Draft, report: EncodingReport) -> bool:
        if not len(draft.sample.tokens):
            raise UserError(f"{draft.where}: the text is empty: remove the record")
        return super()._keep(Draft(draft.where, _with_target(draft.sample, _PLACE_HOLDER)), report)

    def _truncate(self, sample: Sample, report: EncodingReport, where: str) -> Sample:
        limit = self.rules.max_tokens - 1
        if len(sample.tokens) > limit:
            report.cut += 1
            sample = shorten(sample, limit, self.rules.truncation, self._opening)
        return _with_target(sample, self.target(where))


def _with_target(sample: Sample, target: int) -> Sample:
    tokens = np.append(sample.tokens, np.int32(target))
    return Sample(tokens, np.arange(len(tokens)) == len(tokens) - 1)


class LabelEncoder(TargetAtEnd):
    """Tokenizes texts with a class."""

    def __call__(self, records: Sequence[LocatedRecord]) -> EncodedRecords:
        self._labels: dict[str, int] = {}
        return super().__call__(records)

    def target(self, where: str) -> int:
        return self._labels[where]

    def _processed(self, records: Sequence[LocatedRecord], report: EncodingReport) -> Iterator[LocatedRecord]:
        rules = self.rules
        assert isinstance(rules, LabelRules)
        for where, record in super()._processed(records, report):
            self._labels[where] = rules.number_of(record.get("label"), where)
            yield where, {key: value for key, value in record.items() if key != "label"}


class RewardPairEncoder(TargetAtEnd, PairEncoder):
    """Tokenizes pairs of answers, of which a reward model scores the last token."""


class EmbeddingPairEncoder(TargetAtEnd, PairEncoder):
    """Tokenizes pairs of texts that belong together."""

    def _pair(self, where: str, record: Record, report: EncodingReport) -> Sequence[Sample]:
        texts = [(f"{where}: {name}", _record_of(record, name, where)) for name in TEXTS]
        return self._both(texts, where, report)


def _record_of(record: Record, name: str, where: str) -> dict[str, Any]:
    found = record.get(name)
    if isinstance(found, str):
        return {"text": found}
    if isinstance(found, list):
        return {"messages": found}
    raise UserError(
        f"{where}: {name}={found!r} must be a text or a list of messages: a pair has query and positive (keys: "
        f"{', '.join(sorted(record))})"
    )
