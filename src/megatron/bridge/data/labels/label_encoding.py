# SPDX-License-Identifier: Apache-2.0
"""From records to samples for models with a head: texts with a class or a placeholder, words with classes.

Position i of a row predicts token i + 1 of its sample, so the class of a text is stored as one more token, its only
target, and rows, packing and context parallelism need no special case. Words become two samples: the tokens, and a
placeholder followed by the class of each token. Only positions whose class counts are in the loss; transformers'
``DataCollatorForTokenClassification`` gives the others -100.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from megatron.bridge.data.finetuning.rows import Row, SampleRows, make_row
from megatron.bridge.data.labels.label_rules import (
    LabelRules,
    NegativesRules,
    RerankRules,
    WordLabelRules,
)
from megatron.bridge.data.preference.pairs import LabeledSamples, PairEncoder, PairRows
from megatron.bridge.data.records.encoding import (
    NO_TARGET,
    TOO_LONG,
    EncodedRecord,
    EncodedRecords,
    RecordEncoder,
)
from megatron.bridge.data.records.formats import Record
from megatron.bridge.data.records.record_config import EncodingRules
from megatron.bridge.data.records.samples import EncodingReport, Sample, Samples
from megatron.bridge.data.records.sources import LocatedRecord
from megatron.bridge.data.records.truncation import shorten
from megatron.bridge.data.tokenizer import HuggingFaceTokenizer, Tokenizer, appended_tokens
from megatron.bridge.utils.errors import UserError

TEXTS = ("query", "positive")
NEGATIVES = "negatives"
_PLACE_HOLDER = 0


class TargetAtEnd(RecordEncoder):
    """Keeps all tokens of a text as inputs, and its target as one more token."""

    def target(self, location: str) -> int:
        del location
        return _PLACE_HOLDER

    def _close(self, ids: list[int]) -> list[int]:
        """Add what the tokenizer itself puts behind a text, as a model for embeddings may need it."""
        if not isinstance(self.tokenizer, HuggingFaceTokenizer):
            return ids
        return ids + appended_tokens(self.tokenizer.hf)

    def _keep(self, draft: EncodedRecord, report: EncodingReport) -> bool:
        if not len(draft.sample.tokens):
            raise UserError(f"{draft.where}: the text is empty: remove the record")
        return super()._keep(
            EncodedRecord(draft.where, _with_target(draft.sample, _PLACE_HOLDER)), report
        )

    def _truncate(self, sample: Sample, report: EncodingReport, location: str) -> Sample:
        limit = self.rules.max_tokens - 1
        if len(sample.tokens) > limit:
            report.cut += 1
            sample = shorten(sample, limit, self.rules.truncation, self._opening)
        return _with_target(sample, self.target(location))


def _with_target(sample: Sample, target: int) -> Sample:
    tokens = np.append(sample.tokens, np.int32(target))
    return Sample(tokens, np.arange(len(tokens)) == len(tokens) - 1)


class LabelEncoder(TargetAtEnd):
    """Tokenizes texts with a class."""

    def __call__(self, records: Sequence[LocatedRecord]) -> EncodedRecords:
        self._labels: dict[str, int] = {}
        return super().__call__(records)

    def target(self, location: str) -> int:
        return self._labels[location]

    def _processed(
        self, records: Sequence[LocatedRecord], report: EncodingReport
    ) -> Iterator[LocatedRecord]:
        rules = self.rules
        assert isinstance(rules, LabelRules)
        for location, record in super()._processed(records, report):
            self._labels[location] = rules.number_of(record.get("label"), location)
            yield location, {key: value for key, value in record.items() if key != "label"}


class RewardPairEncoder(TargetAtEnd, PairEncoder):
    """Tokenizes pairs of answers, of which a reward model scores the last token."""


class EmbeddingPairEncoder(TargetAtEnd, PairEncoder):
    """Tokenizes pairs of texts that belong together."""

    def _pair(self, location: str, record: Record, report: EncodingReport) -> Sequence[Sample]:
        assert isinstance(self.rules, NegativesRules)
        texts = [(f"{location}: {name}", _record_of(record, name, location)) for name in TEXTS]
        for index, text in enumerate(negatives_of(record, self.rules.negatives, location), 1):
            name = f"negative {index}"
            texts.append((f"{location}: {name}", _record_of({name: text}, name, location)))
        return self._together(texts, location, report)


def negatives_of(record: Record, count: int, location: str) -> list[Any]:
    """Return the first ``count`` hard negatives of a record.

    Raises:
        UserError: The record has fewer.
    """
    if count == 0:
        return []
    texts = record.get(NEGATIVES)
    if not isinstance(texts, list) or len(texts) < count:
        number = len(texts) if isinstance(texts, list) else "none"
        raise UserError(
            f"{location}: dataset.negatives={count}, but the record has {number} in its list {NEGATIVES}: add "
            "texts that do not fit the query, or lower dataset.negatives"
        )
    return texts[:count]


def _record_of(record: Record, name: str, location: str) -> dict[str, Any]:
    content = record.get(name)
    if isinstance(content, str):
        return {"text": content}
    if isinstance(content, list):
        return {"messages": content}
    raise UserError(
        f"{location}: {name}={content!r} must be a text or a list of messages: a pair has query and positive (keys: "
        f"{', '.join(sorted(record))})"
    )


class RerankEncoder(PairEncoder):
    """Tokenizes queries with documents; a record with a label has one, others have a group of them."""

    def _pair(self, location: str, record: Record, report: EncodingReport) -> Sequence[Sample]:
        assert isinstance(self.rules, RerankRules)
        query = _text_of(record, "query", location)
        if self.rules.negatives == 0:
            document = _text_of(record, "document", location)
            sample = self._sample(query, document, location, report)
            return [] if sample is None else [_with_label(sample, record.get("label"), location)]
        documents = [_text_of(record, "positive", location)]
        for text in negatives_of(record, self.rules.negatives, location):
            documents.append(_text_of({NEGATIVES: text}, NEGATIVES, location))
        samples = [self._sample(query, document, location, report) for document in documents]
        kept_samples = [sample for sample in samples if sample is not None]
        return kept_samples if len(kept_samples) == len(samples) else []

    def _sample(
        self, query: str, document: str, location: str, report: EncodingReport
    ) -> Sample | None:
        """Return the tokens of a pair and a placeholder as their target; None if the pair is too long."""
        if isinstance(self.tokenizer, HuggingFaceTokenizer):
            ids: list[int] = list(self.tokenizer.hf(query, document)["input_ids"])
        else:
            ids = [*self.tokenizer.tokenize(query), *self.tokenizer.tokenize(document)]
        limit = self.rules.max_tokens - 1
        if len(ids) > limit and self.rules.truncation == "refuse":
            raise UserError(
                f"{location}: the query and a document have {len(ids)} tokens, more than {limit}, their part of "
                "dataset.seq_length: increase it, or set dataset.truncation to drop or right"
            )
        if len(ids) > limit and self.rules.truncation == "drop":
            report.drop(TOO_LONG, location)
            return None
        report.cut += len(ids) > limit
        sample = Sample(np.array(ids[:limit], np.int32), np.zeros(min(len(ids), limit), np.bool_))
        return _with_target(sample, _PLACE_HOLDER)


def _text_of(record: Record, name: str, location: str) -> str:
    text = record.get(name)
    if isinstance(text, str) and text:
        return text
    raise UserError(
        f"{location}: {name}={text!r} must be a text: a record for a reranker has query, document and label, or "
        f"with dataset.negatives query, positive and negatives (keys: {', '.join(sorted(record))})"
    )


def _with_label(sample: Sample, label: Any, location: str) -> Sample:
    """Return a sample that ends with its label, a float32 whose bits are stored as a token."""
    if not isinstance(label, int | float) or not 0 <= label <= 1:
        raise UserError(
            f"{location}: label={label!r} must be a number from 0 (does not fit) to 1: correct it"
        )
    bits = np.float32(label).view(np.int32)
    return Sample(np.append(sample.tokens, bits), np.append(sample.trained, False))


class RelevanceRows(SampleRows):
    """A query with a document in each row, without padding, and its label as ``relevance`` of all tokens."""

    def __init__(self, samples: Samples, padding: int, multiple: int = 1) -> None:
        super().__init__(LabeledSamples(samples), None, padding, multiple)
        self._with_labels = samples

    def __getitem__(self, index: int) -> Row:
        row = super().__getitem__(index)
        label = self._with_labels[index].tokens[-1:].view(np.float32)[0]
        row["relevance"] = torch.full_like(row["loss_mask"], float(label))
        return row


class WordLabelEncoder(PairEncoder):
    """Tokenizes words, and gives the class of a word to its first token, or to all."""

    def __init__(self, tokenizer: Tokenizer, rules: EncodingRules) -> None:
        super().__init__(tokenizer, rules)
        if not isinstance(tokenizer, HuggingFaceTokenizer) or not tokenizer.hf.is_fast:
            raise UserError(
                "classes of words need a tokenizer that maps tokens to words (a fast Hugging Face tokenizer): "
                "convert the tokenizer"
            )
        self._hf: Any = tokenizer.hf

    def __call__(self, records: Sequence[LocatedRecord]) -> EncodedRecords:
        """Two samples of each record that is kept, in order."""
        encoded = super().__call__(records)
        encoded.report.tokens //= 2  # classes are not text
        return encoded

    def _pair(self, location: str, record: Record, report: EncodingReport) -> Sequence[Sample]:
        words, classes = self._words(record, location)
        encoded = self._hf(words, is_split_into_words=True)
        ids = list(encoded["input_ids"])
        places = encoded.word_ids()
        if not (length := self._fitting(ids, location, report)):
            report.drop(TOO_LONG, location)
            return []
        assert isinstance(self.rules, WordLabelRules)
        before = [None, *places[:-1]]
        counts = [
            word is not None and (self.rules.label_all_tokens or word != last)
            for word, last in zip(places, before, strict=True)
        ][:length]
        if not any(counts):
            report.drop(NO_TARGET, location)
            return []
        of_tokens = [0 if word is None else classes[word] for word in places[:length]]
        tokens = np.array([*ids[:length], 0], np.int32)
        labels = np.array([0, *of_tokens], np.int32)
        return [
            Sample(tokens, np.zeros(len(tokens), np.bool_)),
            Sample(labels, np.array([False, *counts])),
        ]

    def _fitting(self, ids: list[int], location: str, report: EncodingReport) -> int:
        """How many tokens of a record are kept."""
        limit = self.rules.max_tokens - 1
        if len(ids) <= limit:
            return len(ids)
        if self.rules.truncation == "refuse":
            raise UserError(
                f"{location}: the words have {len(ids)} tokens, more than dataset.seq_length={limit}: increase it, "
                "or set dataset.truncation to drop or right"
            )
        if self.rules.truncation == "drop":
            return 0
        report.cut += 1
        return limit

    def _words(self, record: Record, location: str) -> tuple[list[str], list[int]]:
        rules: Any = self.rules
        words = record.get(rules.text_column)
        labels = record.get(rules.label_column)
        if not (
            isinstance(words, list) and isinstance(labels, list) and len(words) == len(labels) > 0
        ):
            raise UserError(
                f"{location}: {rules.text_column} and {rules.label_column} must be lists of equal length, the words "
                f"and their classes (keys: {', '.join(sorted(record))}): correct it, or set "
                "dataset.text_column and dataset.label_column"
            )
        return [str(word) for word in words], [rules.number_of(label, location) for label in labels]


class WordLabelRows(PairRows):
    """The tokens of one record in each row, and as labels their classes."""

    def __getitem__(self, index: int) -> Row:
        tokens, classes = (
            make_row(
                [self.samples[2 * index + part]],
                self.padding,
                self.multiple,
                None,
                self.has_cu_seqlens,
            )
            for part in range(2)
        )
        return {**tokens, "labels": classes["labels"], "loss_mask": classes["loss_mask"]}

    def titles(self, count: int) -> list[str]:
        return []  # classes are no text to show
