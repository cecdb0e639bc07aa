# SPDX-License-Identifier: Apache-2.0
"""The config of pairs of answers."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from megatron.bridge.data.dataset_config import DatasetRequest, Splits
from megatron.bridge.data.finetuning.sft_config import FinetuningDatasetConfig
from megatron.bridge.data.records.chat_template import TrainOn
from megatron.bridge.data.records.record_config import EncodingRules

if TYPE_CHECKING:
    from megatron.bridge.data.finetuning.rows import SampleRows
    from megatron.bridge.data.preference.pairs import PairEncoder
    from megatron.bridge.data.records.samples import Samples
    from megatron.bridge.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class PairRules(EncodingRules):
    """How records become pairs. Prepared samples are keyed by the field name, too."""

    pairs: bool = True


@dataclass(frozen=True)
class LabeledRules(PairRules):
    """How records become answers with a label. Prepared samples are keyed by the field name, too."""

    labeled: bool = True


@dataclass(kw_only=True)
class PreferenceDatasetConfig(FinetuningDatasetConfig):
    """Pairs of answers in the files ``training``, ``validation`` and ``test`` of a folder.

    A record has ``prompt``, ``chosen`` and ``rejected``, all texts or all lists of messages; or only ``chosen`` and
    ``rejected``, two lists of messages with the same beginning. A row is a pair, without padding, and batch sizes count
    pairs. ``seq_length`` limits a pair: each answer with its prompt may have half as many tokens.

    With ``labeled``, a record has ``prompt``, ``completion`` and ``label``, which is true for a desirable answer. A row
    is an answer, followed by the same prompt with the answer to another prompt.
    """

    train_on: TrainOn = "completion"
    """Which part of a conversation counts: the ``completion``, which is all that the answers do not share, or only
    the ``last`` message."""
    padding_free: bool = True
    pair_names: ClassVar[tuple[str, str]] = ("chosen", "rejected")
    labeled: bool | None = (
        None  # whether a record is one answer with a label. None: True with ``dpo.loss_type=kto``
    )

    def pair_rules(self) -> EncodingRules:
        """How records become pairs."""
        rules = self.encoding_rules()
        multiple = self.sequence_multiple
        kind = LabeledRules if self.labeled else PairRules
        return rules.extended(kind, max_tokens=self.seq_length // 2 // multiple * multiple + 1)

    def encoder(self, tokenizer: "Tokenizer") -> "PairEncoder":
        from megatron.bridge.data.preference.pairs import (
            LabeledEncoder,
            PairEncoder,
        )  # imports torch

        return (LabeledEncoder if self.labeled else PairEncoder)(tokenizer, self.pair_rules())

    def rows(self, samples: "Samples", padding: int) -> "SampleRows":
        from megatron.bridge.data.preference.pairs import LabeledRows, PairRows  # imports torch

        if self.labeled:
            return LabeledRows(
                samples, padding, self.pair_rules().max_tokens, self.sequence_multiple
            )
        return PairRows(samples, padding, self.sequence_multiple, self.pair_names)

    def problems(self) -> list[str]:
        problems = super().problems()
        if not self.padding_free or self.packed:
            problems.append(
                "dataset.padding_free=False: rows of pairs have no padding, leave it True, and do not pack"
            )
        if self.train_on not in ("completion", "last"):
            problems.append(
                f"dataset.train_on={self.train_on}: pairs differ in their completion, use completion or last"
            )
        return problems

    def build(self, request: DatasetRequest) -> Splits:
        from megatron.bridge.data.finetuning.builder import build_datasets  # imports torch

        self.finalize()
        return build_datasets(
            self, request, lambda samples: self.rows(samples, request.tokenizer.eod)
        )
