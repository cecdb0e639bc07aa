# SPDX-License-Identifier: Apache-2.0
"""Model sizes: the published configs in ``configs``, which ``make recipe-configs`` writes."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from megatron.bridge.models.hf_pretrained.own_configs import own_config
from megatron.bridge.utils.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from megatron.bridge.models.gpt_provider import GPTModelProvider

_CONFIGS = Path(__file__).with_name("configs")
TEXT_MODEL = "-text"
"""Ending of the text model of a published vision-language model, which has the same hub id without the ending."""
_TRANSLATED = {"rope_scaling", "rope_theta"}
"""Keys that transformers translates. Its import takes longer than all other steps of a recipe."""


def hf_config(numbers: Mapping[str, Any]) -> Any:
    """Build the transformers config with the entries ``numbers``, without remote code."""
    from transformers import AutoConfig

    bundled_class = own_config(numbers["model_type"])
    if bundled_class is not None:
        return bundled_class(**numbers)
    return cast(Any, AutoConfig).for_model(**numbers)


class HFConfigDict(dict[str, Any]):
    """Convert the entries of a config to a bridge's input, without transformers, whose import takes a second."""

    @property
    def architectures(self) -> list[str]:
        return self["architectures"]


@dataclass(frozen=True)
class Size:
    """One published model size.

    The numbers are from its ``config.json``, and the bridge of its family reads them like the downloaded file. So a
    recipe and a converted checkpoint cannot differ, and no network is needed.
    """

    hub_id: str
    """Hub id of the config and the tokenizer."""
    numbers: Mapping[str, Any]
    """The entries of ``config.json`` that define the model."""
    training: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Fields of the provider whose published value is not suitable for training, with the values to train with."""
    published: bool = True
    """Whether ``hub_id`` has a model of this size. If not, it has only a suitable tokenizer."""

    def provider(self) -> "GPTModelProvider":
        from megatron.bridge.models.conversion.auto_bridge import AutoBridge

        provider = AutoBridge.from_hf_config(self._config()).to_megatron_provider(
            load_weights=False
        )
        for name, value in self.training.items():
            setattr(provider, name, value)
        return provider

    def _config(self) -> Any:
        if _TRANSLATED & self.numbers.keys():
            return hf_config(self.numbers)
        return HFConfigDict(self.numbers)


@dataclass(frozen=True)
class VisionSize(Size):
    """Size of a model with a tower; transformers' config class completes the numbers."""

    @property
    def takes_audio(self) -> bool:
        """Whether the tower encodes audio instead of images."""
        return "vision_config" not in self.numbers

    def _config(self) -> Any:
        return hf_config(self.numbers)


@dataclass(frozen=True)
class ProviderSize(Size):
    """Size of a model that was never on the hub and has no bridge: the numbers are the provider's fields."""

    def provider(self) -> "GPTModelProvider":
        from megatron.bridge.models.gpt_provider import GPTModelProvider

        return GPTModelProvider(**self.numbers)


@dataclass(frozen=True)
class CheckpointSize(Size):
    """Size of a user's Hugging Face checkpoint; ``hub_id`` may be a directory."""

    def provider(self) -> "GPTModelProvider":
        from megatron.bridge.models.conversion.auto_bridge import AutoBridge

        return AutoBridge.from_hf_pretrained(self.hub_id).to_megatron_provider(load_weights=False)


def size_of(hub_id: str, training: Mapping[str, Any] | None = None, **changes: Any) -> Size:
    """Return the size of the model ``hub_id``, whose config is in ``configs``.

    The hub id of a vision-language model with the ending ``-text`` is its text model. With ``changes`` of its entries,
    the size was never published and uses the tokenizer of ``hub_id``.

    Raises:
        UserError: the package has no config of ``hub_id``.
    """
    file = _config_file(hub_id)
    if not file.is_file():
        published = [path.stem.replace("--", "/") for path in _CONFIGS.glob("*.json")]
        hint = did_you_mean(hub_id, published)
        raise UserError(
            f"the package has no config of {hub_id}{hint}; for another model, give a Size with the entries of its "
            "config.json"
        )
    numbers: dict[str, Any] = json.loads(file.read_text())
    size_class = VisionSize if {"vision_config", "audio_config"} & numbers.keys() else Size
    model_id = hub_id.removesuffix(TEXT_MODEL)
    return size_class(model_id, {**numbers, **changes}, training or {}, published=not changes)


def sized(model: Size | str) -> Size:
    """Return ``model``, or the published size with that hub id."""
    return size_of(model) if isinstance(model, str) else model


def published_size(hub_id: str) -> Size | None:
    """Return the size of ``hub_id``, if its config is in ``configs``."""
    return size_of(hub_id) if _config_file(hub_id).is_file() else None


def _config_file(hub_id: str) -> Path:
    return _CONFIGS / f"{hub_id.replace('/', '--')}.json"
