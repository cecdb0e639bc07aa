# SPDX-License-Identifier: Apache-2.0
"""Model sizes as rows of numbers."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.recipes import hf_config_compat
from megatron.bridge.recipes.catalog import catalog

DENSE = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
"""The entries that differ between the sizes of most generations."""


def llama3_128k(factor: float) -> dict[str, Any]:
    """The entries of ``config.json`` that extend Llama 3 to 128k positions."""
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    return {"max_position_embeddings": 131072, "rope_scaling": scaling}


def hf_config(numbers: Mapping[str, Any]) -> Any:
    """The transformers config with the entries ``numbers``. It runs no remote code."""
    from transformers import AutoConfig

    from megatron.bridge.models.hf_pretrained.deci_config import DeciConfig

    if numbers["model_type"] == DeciConfig.model_type:
        return DeciConfig(**numbers)
    return cast(Any, AutoConfig).for_model(**numbers)


class HFConfigDict(dict[str, Any]):
    """The entries of a config in the form that a bridge takes; importing transformers would cost a second."""

    @property
    def architectures(self) -> list[str]:
        return self["architectures"]


@dataclass(frozen=True)
class Size:
    """One published model size.

    The numbers are those of its ``config.json`` and go through the bridge of its family, as the downloaded file
    would. So a recipe and a converted checkpoint cannot differ, and no network is needed.
    """

    hub_id: str  # where the config and the tokenizer are published
    numbers: Mapping[str, Any]  # the entries of ``config.json`` that define the model
    # fields of the provider whose published value is not suitable for training, with the values to train with
    training: Mapping[str, Any] = field(default_factory=dict[str, Any])
    published: bool = True  # whether ``hub_id`` has a model of this size. If not, it has only a suitable tokenizer.

    def provider(self) -> GPTModelProvider:
        from megatron.bridge.models.conversion.auto_bridge import AutoBridge

        config = HFConfigDict(hf_config_compat.current(self.numbers))
        provider = AutoBridge.from_hf_config(config).to_megatron_provider(load_weights=False)
        for name, value in self.training.items():
            setattr(provider, name, value)
        return provider


@dataclass(frozen=True)
class VisionSize(Size):
    """A size of a vision-language model, whose numbers transformers' config class completes."""

    def provider(self) -> GPTModelProvider:
        from megatron.bridge.models.conversion.auto_bridge import AutoBridge

        return AutoBridge.from_hf_config(hf_config(self.numbers)).to_megatron_provider(load_weights=False)


@dataclass(frozen=True)
class ProviderSize(Size):
    """A size that no bridge reads because it was never on the hub: the numbers are the provider's fields."""

    def provider(self) -> GPTModelProvider:
        return GPTModelProvider(**self.numbers)


@dataclass(frozen=True)
class CheckpointSize(Size):
    """The size of a Hugging Face checkpoint of the user; ``hub_id`` may be a directory."""

    def provider(self) -> GPTModelProvider:
        from megatron.bridge.models.conversion.auto_bridge import AutoBridge

        return AutoBridge.from_hf_pretrained(self.hub_id).to_megatron_provider(load_weights=False)


def published_size(hub_id: str) -> Size | None:
    """The size of ``hub_id``, if there is a recipe for it."""
    modules = [importlib.import_module(name) for name in sorted({recipe.module for recipe in catalog().values()})]
    values: list[Any] = [value for module in modules for value in vars(module).values()]
    found = (value for value in values if isinstance(value, Size) and value.published)
    return next((size for size in found if size.hub_id == hub_id), None)


@dataclass(frozen=True)
class Generation:
    """What the sizes of one generation of models have in common."""

    common: Mapping[str, Any]  # entries of ``config.json`` that all sizes share, unless a size overrides them
    columns: tuple[str, ...] = DENSE  # entries that each size gives, in this order
    training: Mapping[str, Any] = field(default_factory=dict[str, Any])  # see ``Size``

    def size(self, hub_id: str, *row: int, **others: Any) -> Size:
        """The size with the numbers of ``row``; ``others`` override or extend the common entries."""
        own = dict(zip(self.columns, row, strict=True))
        return Size(hub_id, {**self.common, **own, **others}, self.training)
