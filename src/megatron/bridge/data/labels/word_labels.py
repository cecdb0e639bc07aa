# SPDX-License-Identifier: Apache-2.0
"""From records of words with a class each to tokens with a class each.

A record becomes two samples: the tokens, and behind a place holder the class of each token. Only positions whose
class counts are in the loss; transformers' ``DataCollatorForTokenClassification`` gives the others -100.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron.bridge.data.finetuning.rows import Row, make_row
from megatron.bridge.data.labels.label_rules import WordLabelRules
from megatron.bridge.data.preference.pairs import PairEncoder, PairRows
from megatron.bridge.data.records.encoding import NO_TARGET, TOO_LONG, EncodedRecords
from megatron.bridge.data.records.formats import Record
from megatron.bridge.data.records.record_config import EncodingRules
from megatron.bridge.data.records.samples import EncodingReport, Sample
from megatron.bridge.data.records.sources import LocatedRecord
from megatron.bridge.data.tokenizer import HuggingFaceTokenizer, Tokenizer
from megatron.bridge.utils.errors import UserError


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

    def _pair(self, where: str, record: Record, report: EncodingReport) -> Sequence[Sample]:
        words, classes = self._words(record, where)
        encoded = self._hf(words, is_split_into_words=True)
        ids, places = list(encoded["input_ids"]), encoded.word_ids()
        if not (found := self._fitting(ids, where, report)):
            report.drop(TOO_LONG, where)
            return []
        assert isinstance(self.rules, WordLabelRules)
        before = [None, *places[:-1]]
        counts = [
            place is not None and (self.rules.label_all_tokens or place != last)
            for place, last in zip(places, before, strict=True)
        ][:found]
        if not any(counts):
            report.drop(NO_TARGET, where)
            return []
        of_tokens = [0 if place is None else classes[place] for place in places[:found]]
        tokens = np.array([*ids[:found], 0], np.int32)
        labels = np.array([0, *of_tokens], np.int32)
        return [Sample(tokens, np.zeros(len(tokens), np.bool_)), Sample(labels, np.array([False, *counts]))]

    def _fitting(self, ids: list[int], where: str, report: EncodingReport) -> int:
        """How many tokens of a record are kept."""
        limit = self.rules.max_tokens - 1
        if len(ids) <= limit:
            return len(ids)
        if self.rules.truncation == "refuse":
            raise UserError(
                f"{where}: the words have {len(ids)} tokens, more than dataset.seq_length={limit}: increase it, "
                "or set dataset.truncation to drop or right"
            )
        if self.rules.truncation == "drop":
            return 0
        report.cut += 1
        return limit

    def _words(self, record: Record, where: str) -> tuple[list[str], list[int]]:
        rules: Any = self.rules
        words, labels = record.get(rules.text_column), record.get(rules.label_column)
        if not (isinstance(words, list) and isinstance(labels, list) and len(words) == len(labels) > 0):
            raise UserError(
                f"{where}: {rules.text_column} and {rules.label_column} must be lists of equal length, the words "
                f"and their classes (keys: {', '.join(sorted(record))}): correct it, or set "
                "dataset.text_column and dataset.label_column"
            )
        return [str(word) for word in words], [rules.number_of(label, where) for label in labels]


class WordLabelRows(PairRows):
    """The tokens of one record in each row, and as labels their classes."""

    def __getitem__(self, index: int) -> Row:
        tokens, classes = (
            make_row([self.samples[2 * index + part]], self.padding, self.multiple, None, self.has_cu_seqlens)
            for part in range(2)
        )
        return {**tokens, "labels": classes["labels"], "loss_mask": classes["loss_mask"]}

    def titles(self, count: int) -> list[str]:
        return []  # classes are no text to show
