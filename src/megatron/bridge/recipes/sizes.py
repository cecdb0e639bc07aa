# SPDX-License-Identifier: Apache-2.0
"""Model sizes as rows of numbers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from megatron.bridge.models.gpt_provider import GPTModelProvider


@dataclass(frozen=True)
class Size:
    """One published model size.

    The numbers are those of its ``config.json`` and go through the bridge of its family, as the downloaded file
    would: a recipe and a converted checkpoint cannot differ, and no network is needed.

    Attributes:
        hub_id: Where the config and the tokenizer are published.
        numbers: The entries of ``config.json`` that define the model.
    """

    hub_id: str
    numbers: Mapping[str, Any]

    def provider(self) -> GPTModelProvider:
        """A fresh provider of this size."""
        from transformers import AutoConfig

        from megatron.bridge.models.conversion.auto_bridge import AutoBridge

        config = cast(Any, AutoConfig).for_model(**self.numbers)
        return AutoBridge.from_hf_config(config).to_megatron_provider(load_weights=False)
