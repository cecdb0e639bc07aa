# SPDX-License-Identifier: Apache-2.0
"""The configs of data for models with a head."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from megatron.bridge.data.finetuning.sft_config import FinetuningDatasetConfig
from megatron.bridge.data.labels.label_rules import (
    LabelRules,
    NegativesRules,
    RerankRules,
    TextPairRules,
    WordLabelRules,
)
from megatron.bridge.data.preference.preference_config import PreferenceDatasetConfig
from megatron.bridge.data.records.record_config import EncodingRules
from megatron.bridge.utils.config.ranges import AT_LEAST_ZERO

if TYPE_CHECKING:
    from megatron.bridge.data.finetuning.rows import SampleRows
    from megatron.bridge.data.labels.label_encoding import (
        EmbeddingPairEncoder,
        LabelEncoder,
        RerankEncoder,
        RewardPairEncoder,
        WordLabelEncoder,
    )
    from megatron.bridge.data.preference.pairs import PairRows
    from megatron.bridge.data.records.samples import Samples
    from megatron.bridge.data.tokenizer import Tokenizer


@dataclass(kw_only=True)
class ClassificationDatasetConfig(FinetuningDatasetConfig):
    """Texts with a class in the files ``training``, ``validation`` and ``test`` of a folder.

    A record has the key ``label``, a number from 0 or a name of ``label_names``, and a text in any format of
    ``RecordDatasetConfig``: ``text``, ``prompt`` and ``completion``, or ``messages``. The last token of the text
    is scored, and nothing is appended to what the tokenizer makes of it. ``train_on`` has no effect.
    """

    num_labels: int | None = None  # number of classes; None takes ``model.num_labels``
    label_names: list[str] | None = (
        None  # names of the classes, in the order of their numbers; None takes numbers only
    )

    def encoding_rules(self) -> EncodingRules:
        names = tuple(self.label_names or ())
        return (
            super()
            .encoding_rules()
            .extended(LabelRules, num_labels=self.num_labels, label_names=names)
        )

    def encoder(self, tokenizer: "Tokenizer") -> "LabelEncoder":
        from megatron.bridge.data.labels.label_encoding import LabelEncoder  # imports torch

        return LabelEncoder(tokenizer, self.encoding_rules())

    def problems(self) -> list[str]:
        problems = super().problems()
        if self.split_turns:
            problems.append(
                "dataset.split_turns=True: a record has one label, so it is one sample, set it to False"
            )
        problems += _unequal_names(self.label_names, self.num_labels)
        return problems


def _unequal_names(names: list[str] | None, count: int | None) -> list[str]:
    if names is None or count is None or len(names) == count:
        return []
    return [
        f"dataset.label_names has {len(names)} names, and there are {count} classes: name each class, or set "
        "model.num_labels"
    ]


@dataclass(kw_only=True)
class TokenClassificationDatasetConfig(PreferenceDatasetConfig):
    """Words with a class each in the files ``training``, ``validation`` and ``test`` of a folder.

    A record has a list of words in ``text_column`` and a list of their classes, numbers from 0 or names of
    ``label_names``, in ``label_column``. A row is a record, without padding. Tokens that the tokenizer adds to
    a text have no class.
    """

    num_labels: int | None = None  # number of classes; None takes ``model.num_labels``
    label_names: list[str] | None = (
        None  # names of the classes, in the order of their numbers; None takes numbers only
    )
    label_all_tokens: bool = (
        False  # whether all tokens of a word have its class; else only the first one counts
    )
    text_column: str = "tokens"  # the key of the words
    label_column: str = "ner_tags"  # the key of their classes

    def pair_rules(self) -> EncodingRules:
        return self.encoding_rules().extended(
            WordLabelRules,
            num_labels=self.num_labels,
            label_names=tuple(self.label_names or ()),
            label_all_tokens=self.label_all_tokens,
            text_column=self.text_column,
            label_column=self.label_column,
        )

    def encoder(self, tokenizer: "Tokenizer") -> "WordLabelEncoder":  # pyright: ignore
        from megatron.bridge.data.labels.label_encoding import WordLabelEncoder  # imports torch

        return WordLabelEncoder(tokenizer, self.pair_rules())

    def rows(self, samples: "Samples", padding: int) -> "PairRows":
        from megatron.bridge.data.labels.label_encoding import WordLabelRows  # imports torch

        return WordLabelRows(samples, padding, self.sequence_multiple)

    def problems(self) -> list[str]:
        problems = super().problems() + _unequal_names(self.label_names, self.num_labels)
        if self.truncation not in ("refuse", "drop", "right"):
            problems.append(
                f"dataset.truncation={self.truncation}: words are cut at their end, use refuse, drop or right"
            )
        return problems


@dataclass(kw_only=True)
class _TextPairsConfig(PreferenceDatasetConfig):
    """Pairs of complete texts, of which the last token counts."""

    def pair_rules(self) -> EncodingRules:
        return super().pair_rules().extended(TextPairRules)


@dataclass(kw_only=True)
class RewardDatasetConfig(_TextPairsConfig):
    """Pairs of answers for a reward model, in the format of ``PreferenceDatasetConfig``.

    The last token of each answer is scored, and nothing is appended to what the tokenizer makes of prompt and answer.
    """

    def encoder(self, tokenizer: "Tokenizer") -> "RewardPairEncoder":  # pyright: ignore
        from megatron.bridge.data.labels.label_encoding import RewardPairEncoder  # imports torch

        return RewardPairEncoder(tokenizer, self.pair_rules())


@dataclass(kw_only=True)
class EmbeddingDatasetConfig(_TextPairsConfig):
    """Pairs of texts that belong together, for an embedding model.

    A record has ``query`` and ``positive``, each a text or a list of messages, and with ``negatives`` a list
    ``negatives`` of texts that do not fit. ``seq_length`` limits all of them: each text may have an equal part.
    """

    negatives: Annotated[int, AT_LEAST_ZERO] = 0
    """Hard negatives of each record: the first of its list. Without any, the texts of other records are negatives."""

    def pair_rules(self) -> EncodingRules:
        return _limited(super().pair_rules(), self, 2).extended(
            NegativesRules, negatives=self.negatives
        )

    def rows(self, samples: "Samples", padding: int) -> "PairRows":
        from megatron.bridge.data.preference.pairs import PairRows  # imports torch

        names = ("query", "positive", *_names_of_negatives(self.negatives))
        return PairRows(samples, padding, self.sequence_multiple, names)

    def encoder(self, tokenizer: "Tokenizer") -> "EmbeddingPairEncoder":  # pyright: ignore
        from megatron.bridge.data.labels.label_encoding import EmbeddingPairEncoder  # imports torch

        return EmbeddingPairEncoder(tokenizer, self.pair_rules())


@dataclass(kw_only=True)
class RerankDatasetConfig(_TextPairsConfig):
    """Queries with documents, for a reranker: a model that scores both as one text.

    A record has ``query``, ``document`` and ``label``, a number from 0 (does not fit) to 1. With ``negatives``, it has
    ``query``, ``positive`` and a list ``negatives`` instead, and its documents are a row. The tokens are those that the
    tokenizer makes of the pair, as the ``CrossEncoder`` of sentence-transformers asks for.
    """

    negatives: Annotated[int, AT_LEAST_ZERO] = 0
    """Hard negatives of each record: the first of its list. 0 reads records with a ``label``."""

    def pair_rules(self) -> EncodingRules:
        return _limited(super().pair_rules(), self, 1).extended(
            RerankRules, negatives=self.negatives
        )

    def encoder(self, tokenizer: "Tokenizer") -> "RerankEncoder":  # pyright: ignore
        from megatron.bridge.data.labels.label_encoding import RerankEncoder  # imports torch

        return RerankEncoder(tokenizer, self.pair_rules())

    def rows(self, samples: "Samples", padding: int) -> "SampleRows":
        from megatron.bridge.data.labels.label_encoding import RelevanceRows  # imports torch
        from megatron.bridge.data.preference.pairs import PairRows

        if self.negatives == 0:
            return RelevanceRows(samples, padding, self.sequence_multiple)
        names = ("positive", *_names_of_negatives(self.negatives))
        return PairRows(samples, padding, self.sequence_multiple, names)

    def problems(self) -> list[str]:
        problems = super().problems()
        if self.truncation not in ("refuse", "drop", "right"):
            problems.append(
                f"dataset.truncation={self.truncation}: documents are cut at their end, use refuse, drop or right"
            )
        return problems


def _limited(
    rules: EncodingRules, config: EmbeddingDatasetConfig | RerankDatasetConfig, texts: int
) -> EncodingRules:
    """Return ``rules`` in which each text of a row has an equal part of ``seq_length``.

    Args:
        rules: Of pairs.
        config: Has the length, and the number of negatives.
        texts: Texts of a row without negatives.
    """
    multiple = config.sequence_multiple
    length = config.seq_length // (texts + config.negatives) // multiple * multiple
    return replace(rules, max_tokens=length + 1)


def _names_of_negatives(count: int) -> list[str]:
    return [f"negative {index + 1}" for index in range(count)]
