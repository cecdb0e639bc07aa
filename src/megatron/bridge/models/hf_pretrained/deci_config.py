# SPDX-License-Identifier: Apache-2.0
"""The config of Llama-Nemotron models, which is remote code on the hub: read here without running it."""

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import LlamaConfig


@strict
class DeciConfig(LlamaConfig):
    """Llama's config with attention and feed-forward layers described one by one."""

    model_type = "nemotron-nas"

    intermediate_size: int | None = None  # type: ignore[assignment]
    num_key_value_heads: int | None = None
    block_configs: list[dict[str, Any]] | None = None  # for each layer its ``attention`` and its ``ffn``

    def __post_init__(self, **kwargs: Any) -> None:
        """Fill in defaults, but for what differs from layer to layer."""
        super().__post_init__(**kwargs)
        self.num_key_value_heads = None
