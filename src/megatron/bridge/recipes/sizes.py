# SPDX-License-Identifier: Apache-2.0
"""Model sizes as rows of numbers."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.recipes import spelling
from megatron.bridge.recipes.catalog import catalog

DENSE = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
"""What differs between the sizes of most generations."""


def hf_config(numbers: Mapping[str, Any]) -> Any:
    """The transformers config with the entries ``numbers``; no remote code is run."""
    from transformers import AutoConfig

    from megatron.bridge.models.hf_pretrained.deci_config import DeciConfig

    if numbers["model_type"] == DeciConfig.model_type:
        return DeciConfig(**numbers)
    return cast(Any, AutoConfig).for_model(**numbers)


class Spelt(dict[str, Any]):
    """Entries of a config as a bridge takes them; those of transformers would cost a second to import."""

    @property
    def architectures(self) -> list[str]:
        """Names of the classes that the config is for."""
        return self["architectures"]


@dataclass(frozen=True)
class Size:
    """One published model size.

    The numbers are those of its ``config.json`` and go through the bridge of its family, as the downloaded file
    would: a recipe and a converted checkpoint cannot differ, and no network is needed.

    Attributes:
        hub_id: Where the config and the tokenizer are published.
        numbers: The entries of ``config.json`` that define the model.
        training: Fields of the provider for which the published number is not one to train with.
        published: Whether ``hub_id`` has this size; if not, it has a tokenizer that fits.
    """

    hub_id: str
    numbers: Mapping[str, Any]
    training: Mapping[str, Any] = field(default_factory=dict[str, Any])
    published: bool = True

    def provider(self) -> GPTModelProvider:
        """A fresh provider of this size."""
        from megatron.bridge.models.conversion.auto_bridge import AutoBridge

        config = Spelt(spelling.current(self.numbers))
        provider = AutoBridge.from_hf_config(config).to_megatron_provider(load_weights=False)
        for name, value in self.training.items():
            setattr(provider, name, value)
        return provider


@dataclass(frozen=True)
class Unbridged(Size):
    """A size that was never on the hub, in a form that no bridge reads: the numbers are the provider's fields."""

    def provider(self) -> GPTModelProvider:
        """A fresh provider of this size."""
        return GPTModelProvider(**self.numbers)


@dataclass(frozen=True)
class Given(Size):
    """The size of a model that somebody has: ``hub_id`` may be a directory, and has the numbers."""

    def provider(self) -> GPTModelProvider:
        """A fresh provider of this size."""
        from megatron.bridge.models.conversion.auto_bridge import AutoBridge

        return AutoBridge.from_hf_pretrained(self.hub_id).to_megatron_provider(load_weights=False)


def published_size(hub_id: str) -> Size | None:
    """The size that the hub has under ``hub_id``, if a recipe knows it."""
    modules = [importlib.import_module(name) for name in sorted({recipe.module for recipe in catalog().values()})]
    values: list[Any] = [value for module in modules for value in vars(module).values()]
    found = (value for value in values if isinstance(value, Size) and value.published)
    return next((size for size in found if size.hub_id == hub_id), None)


@dataclass(frozen=True)
class Generation:
    """What the sizes of one generation of models have in common.

    Attributes:
        common: Entries of ``config.json`` that all have, unless a size says otherwise.
        columns: Entries that each size gives in this order.
        training: see ``Size``.
    """

    common: Mapping[str, Any]
    columns: tuple[str, ...] = DENSE
    training: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def size(self, hub_id: str, *row: int, **others: Any) -> Size:
        """The size with the numbers of ``row``, and of ``others`` where they are not the common ones."""
        own = dict(zip(self.columns, row, strict=True))
        return Size(hub_id, {**self.common, **own, **others}, self.training)
