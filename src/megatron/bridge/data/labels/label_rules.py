# SPDX-License-Identifier: Apache-2.0
"""How records become samples for models with a head."""

from dataclasses import dataclass
from typing import Any

from megatron.bridge.data.preference.preference_config import PairRules
from megatron.bridge.data.records.record_config import EncodingRules
from megatron.bridge.utils.errors import UserError


@dataclass(frozen=True)
class LabelRules(EncodingRules):
    """How records become samples with a class. Prepared samples are keyed by the field names, too."""

    num_labels: int | None = None
    label_names: tuple[str, ...] = ()

    def number_of(self, label: Any, location: str) -> int:
        names = self.label_names
        if isinstance(label, str) and label in names:
            return names.index(label)
        known = len(names) or self.num_labels or 0
        if isinstance(label, int) and not isinstance(label, bool) and 0 <= label < known:
            return label
        choices = f" or one of {', '.join(names)}" if names else ""
        raise UserError(
            f"{location}: label={label!r} must be a number from 0 to {known - 1}{choices}: correct it, or set "
            "dataset.label_names or model.num_labels"
        )


@dataclass(frozen=True)
class WordLabelRules(LabelRules):
    """How records become samples with a class for each token. Prepared samples are keyed by the field names, too."""

    label_all_tokens: bool = False
    text_column: str = "tokens"
    label_column: str = "ner_tags"


@dataclass(frozen=True)
class TextPairRules(PairRules):
    """How records become pairs of complete texts. Prepared samples are keyed by the field name, too."""

    whole_texts: bool = True


@dataclass(frozen=True)
class NegativesRules(TextPairRules):
    """How records become groups of texts. Prepared samples are keyed by the field names, too."""

    negatives: int = 0


@dataclass(frozen=True)
class RerankRules(NegativesRules):
    """How records become texts of a query and a document. Prepared samples are keyed by the field name, too."""

    reranks: bool = True
