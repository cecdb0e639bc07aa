# SPDX-License-Identifier: Apache-2.0
"""How records become samples for models with a head."""

from dataclasses import dataclass

from megatron.bridge.data.preference.preference_config import PairRules
from megatron.bridge.data.records.record_config import EncodingRules


@dataclass(frozen=True)
class LabelRules(EncodingRules):
    """How records become samples with a class. The field names are part of the key of prepared samples."""

    num_labels: int | None = None
    label_names: tuple[str, ...] = ()


@dataclass(frozen=True)
class TextPairRules(PairRules):
    """How records become pairs of whole texts. The field name is part of the key of prepared samples."""

    whole_texts: bool = True
