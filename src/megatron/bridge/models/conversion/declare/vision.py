# SPDX-License-Identifier: Apache-2.0
"""Vision-language checkpoints: a decoder that its text family declares, and a vision tower of transformers.

A family declares the text architecture of its decoder, the names of the parts in a checkpoint, and the modules of the
tower. Tower weights keep the names of transformers under ``vision.``.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any, ClassVar, cast

from megatron.bridge.models.conversion.declare.blocks import Block
from megatron.bridge.models.conversion.declare.fields import (
    IRRELEVANT,
    ConfigError,
    HarmlessKeys,
    unknown_keys,
)
from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.model_bridge import (
    DecoderBridge,
    MegatronModelBridge,
    bridge_for,
)
from megatron.bridge.models.conversion.param_mapping import MegatronParamMapping, ReplicatedMapping
from megatron.bridge.models.hf_pretrained.safetensors_files import TensorEntry
from megatron.bridge.models.vision.provider import VisionGPTModelProvider
from megatron.bridge.models.vision.tower import hf_config

_TEXT, _TIED, _ROPE = (
    "text_config",
    "tie_word_embeddings",
    "rope_parameters",
)
_MROPE = ("mrope_section", "mrope_interleaved")
_TWICE = ("video_temporal_patch_size",)  # transformers requires equal values in both parts
_PARAMETERS = ("image_newline", "embed_vision.pos_embedding")
_OF_TEXT = (
    "model_type",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
)
_OF_WHOLE = (
    "architectures",
    "dtype",
    "quantization_config",
    "transformers_version",
    "_name_or_path",
)

_HARMLESS: dict[str, tuple[Any, ...] | None] = {
    **dict.fromkeys(
        (
            "ignore_index",
            "vision_token_id",
            "vocab_size",
            "_vocab_size",
            "use_reentrant_checkpointing",
        )
    ),
    "use_image_newline_parameter": (True,),
}
"""Keys of published configs that transformers does not read."""
_HARMLESS_IN_VISION: dict[str, tuple[Any, ...] | None] = {
    **dict.fromkeys(
        ("spatial_patch_size", "initializer_factor", "max_image_size", "size", "vocab_size")
    ),
    **dict.fromkeys(("num_image_tokens", "num_positions", "projector_hidden_act")),
    "tie_word_embeddings": None,
    "in_chans": (3,),
    "dropout": (0.0,),
    "hidden_dropout_prob": (0.0,),
    "use_base_siglip": (False,),
    "vision_feature_layer": (-1,),
}

Prefixes = Mapping[str, str]
"""Prefixes of names -> their prefixes in a checkpoint."""


class VisionBridge(DecoderBridge):
    """A bridge with two parts: the text model's bridge reads ``text_config``, transformers reads the rest."""

    texts: ClassVar[
        dict[str, str]
    ] = {}  # ``model_type`` of the text config -> the architecture whose bridge reads it
    tower: ClassVar[tuple[str, ...]] = (
        "vision_tower",
        "multi_modal_projector",
    )  # modules in addition to the language model
    tower_config: ClassVar[str] = "vision_config"  # the key with the config of the tower
    language: ClassVar[str] = "language_model"  # transformers' name of the language model
    names: ClassVar[
        Prefixes
    ] = {}  # prefixes of the text model and the tower in transformers' files
    other_names: ClassVar[
        Mapping[str, Prefixes]
    ] = {}  # a prefix that only other checkpoints have -> their prefixes
    text_values: ClassVar[dict[str, Any]] = {}
    """Keys that the text model's bridge reads but transformers' model does not, with the values that the model uses,
    or a function of ``text_config``."""
    text_ignored: ClassVar[tuple[str, ...]] = ()  # keys of ``text_config`` without effect here
    values: ClassVar[
        dict[str, Any]
    ] = {}  # attributes of the provider that the architecture implies
    extra_weights: ClassVar[Block] = ()  # replace mappings of the text model's bridge
    tied_unless_said: ClassVar[bool] = (
        False  # whether embeddings are tied if ``config.json`` does not say
    )

    def provider_of(self, config: Mapping[str, Any], raw: Mapping[str, Any]) -> Any:
        self._check(config)
        text = {**self._text_config(config), _TIED: self._is_tied(raw)}
        try:
            provider = self._text_bridge(config).provider_bridge(SimpleNamespace(config=text))
        except ConfigError as error:
            removable = (f"{_TEXT}.{key}" for key in error.removable)
            raise ConfigError([str(error)], removable) from error
        values = {
            field.name: getattr(provider, field.name)
            for field in dataclasses.fields(provider)
            if field.init
        }
        del values["deallocate_pipeline_outputs"]  # models with a tower have a different default
        rope: dict[str, Any] = config[_TEXT].get(_ROPE) or {}
        sections = {key: rope[key] for key in _MROPE if key in rope}
        return self._provider(
            **{**values, **self.values, **sections, "vision": self._vision_config(config)}
        )

    @property
    def _provider(self) -> Any:
        return (self.registration.provider if self.registration else None) or VisionGPTModelProvider

    def _vision_config(self, full_config: Mapping[str, Any]) -> dict[str, Any]:
        vision_keys = {
            key: value
            for key, value in full_config.items()
            if key not in (*_OF_WHOLE, _TEXT, _TIED)
        }
        text = {
            key: full_config[_TEXT][key]
            for key in _OF_TEXT
            if full_config[_TEXT].get(key) is not None
        }
        return {**vision_keys, _TEXT: text}

    def _text_config(self, full_config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the config that the text model's bridge reads."""
        text = {
            key: value for key, value in full_config[_TEXT].items() if key not in self.text_ignored
        }
        if isinstance(rope := text.get(_ROPE), dict):
            text[_ROPE] = _without_mrope(cast(dict[str, Any], rope))
        dtype = full_config.get("dtype") or text.get("dtype")
        implied = {
            key: value(text) if callable(value) else value
            for key, value in self.text_values.items()
        }
        return {**text, **implied, "dtype": dtype, _TIED: full_config.get(_TIED, False)}

    def _is_tied(self, raw: Mapping[str, Any]) -> bool:
        """Return whether embeddings are tied according to ``config.json``."""
        return raw.get(_TIED, raw.get(_TEXT, {}).get(_TIED, self.tied_unless_said))

    def _text_bridge(self, full_config: Mapping[str, Any]) -> MegatronModelBridge:
        return bridge_for(
            SimpleNamespace(architectures=[self.texts[full_config[_TEXT]["model_type"]]])
        )

    def _check(self, config: Mapping[str, Any]) -> None:
        missing = [
            f"{name} is not set" for name in (_TEXT, self.tower_config) if not config.get(name)
        ]
        if missing:
            raise ConfigError(missing)
        unknown = _unknown_vision_keys(config, self.tower_config, self.irrelevant)
        problems = list(unknown.values())
        kind = config[_TEXT].get("model_type")
        if kind not in self.texts:
            problems.append(
                f"{_TEXT}.model_type={kind!r} is not supported: {' and '.join(self.texts)} are"
            )
        if problems:
            raise ConfigError(problems, unknown)

    def megatron_to_hf_config(self, provider: Any) -> dict[str, Any]:
        """Return the complete config of a provider with a tower, or an empty dict without a tower."""
        if provider.vision is None:
            return {}
        text = self._text_bridge(provider.vision).megatron_to_hf_config(provider)
        tied = text.pop(_TIED, False)
        dtype = text.pop("dtype")
        del text["architectures"]
        source_text = provider.vision[_TEXT]
        text = self._written(
            {**source_text, **text, "model_type": source_text["model_type"]}, provider
        )
        known = {"architectures": [self._architecture], "dtype": dtype, _TIED: tied}
        return {**known, **provider.vision, _TEXT: text}

    def changed_config(self, provider: Any, hf_config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the changed keys of both parts; dtype and tied embeddings belong to the complete config."""
        readable, _ = self._read(hf_config, hf_config)
        text = self._text_config(readable)
        changed = self._text_bridge(readable).changed_config(provider, text)
        full_config = {key: changed.pop(key) for key in (_TIED, "dtype") if key in changed}
        rope: dict[str, Any] = hf_config[_TEXT].get(_ROPE) or {}
        sections = provider.mrope_section and [*provider.mrope_section]
        if sections and rope.get("mrope_section", sections) != sections:
            changed.setdefault(_ROPE, rope)
        if changed:
            full_config[_TEXT] = {**hf_config[_TEXT], **self._written(changed, provider)}
        vision: dict[str, Any] = provider.vision or {}
        for key, value in vision.items():
            if key == _TEXT or key not in readable or readable[key] == value:
                continue
            # keys that transformers never reads are not in the provider, and stay as they are
            is_part = isinstance(value, dict) and isinstance(hf_config[key], dict)
            full_config[key] = {**hf_config[key], **value} if is_part else value
        return full_config

    def _written(self, text: dict[str, Any], provider: Any) -> dict[str, Any]:
        """Return the values of ``text_config``, with the sections of rotary embeddings."""
        if _ROPE in text and provider.mrope_section is not None:
            sections: dict[str, Any] = {"mrope_section": list(provider.mrope_section)}
            if provider.mrope_interleaved:
                sections["mrope_interleaved"] = True
            text = {**text, _ROPE: {**text[_ROPE], **sections}}
        return {key: value for key, value in text.items() if key not in self.text_values}

    def mapping_registry(self) -> MegatronMappingRegistry:
        """Return the mappings of the first text architecture."""
        text = bridge_for(SimpleNamespace(architectures=[next(iter(self.texts.values()))]))
        return self._joined(text.mapping_registry())

    def registry_for(self, config: Any) -> MegatronMappingRegistry:
        """Return the text model's mappings under the names of this checkpoint, and the tower's mappings."""
        text = self._text_bridge(config.vision or {_TEXT: {"model_type": next(iter(self.texts))}})
        return self._joined(text.registry_for(config))

    def _joined(self, text: MegatronMappingRegistry) -> MegatronMappingRegistry:
        replaced = {mapping.megatron_param for mapping in self.extra_weights}
        mappings = [
            mapping for mapping in text.get_all_mappings() if mapping.megatron_param not in replaced
        ]
        mappings += [*self.extra_weights, *_tower_mappings(self.tower)]
        return renamed(mappings, self.names)

    def carried_by(self, config: Any, entries: Mapping[str, TensorEntry]) -> tuple[str, ...]:
        """Return the tower's tensors if the text model is built without the tower."""
        if config.vision is not None:
            return ()
        names = {**self.names, **self._names_of(entries)}
        parts = (part if part in _PARAMETERS else f"{part}.**" for part in self.tower)
        return tuple(_with_stored_prefix(part, names) for part in parts)

    def spelled_as(
        self, registry: MegatronMappingRegistry, entries: Mapping[str, TensorEntry]
    ) -> MegatronMappingRegistry:
        """Return ``registry`` under the alternative names that a checkpoint may have."""
        stored_prefixes = self._names_of(entries)
        back = {
            standard_prefix: stored_prefixes.get(text_prefix, text_prefix)
            for text_prefix, standard_prefix in self.names.items()
        }
        back |= {
            text_prefix: standard_prefix
            for text_prefix, standard_prefix in stored_prefixes.items()
            if text_prefix not in self.names
        }
        return renamed(registry.get_all_mappings(), back) if stored_prefixes else registry

    def as_modules(self, registry: MegatronMappingRegistry) -> MegatronMappingRegistry:
        module_prefixes = {"model.": f"model.{self.language}.", "lm_head.": "lm_head."}
        module_prefixes |= {part: f"model.{part}" for part in self.tower}
        stored = {
            _with_stored_prefix(name, self.names): module
            for name, module in module_prefixes.items()
        }
        return renamed(registry.get_all_mappings(), stored)

    def _names_of(self, entries: Mapping[str, TensorEntry]) -> Prefixes:
        """Return the alternative prefixes in a checkpoint, or none if it has transformers' names."""
        for beginning, alternative_prefixes in self.other_names.items():
            if any(name.startswith(beginning) for name in entries):
                return alternative_prefixes
        return {}


LLAVA_NAMES: Prefixes = {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."}
"""Names of Llava and its many successors."""

LLAVA_OTHER_NAMES: Mapping[str, Prefixes] = {
    "model.language_model.": {
        "model.": "model.language_model.",
        "lm_head.": "lm_head.",
        **{
            part: f"model.{part}"
            for part in ("vision_tower.", "multi_modal_projector.", "image_newline")
        },
    },
    "vision_tower.vision_model.": {**LLAVA_NAMES, "vision_tower.": "vision_tower.vision_model."},
}
"""Names that transformers 4.52 to 4.57 wrote, and older names on the hub."""


class AudioBridge(VisionBridge):
    """A bridge whose tower encodes audio."""

    tower_config = "audio_config"
    tower = ("audio_tower", "multi_modal_projector")
    names = LLAVA_NAMES
    other_names: ClassVar[Mapping[str, Prefixes]] = {
        "model.language_model.": {
            "model.": "model.language_model.",
            "lm_head.": "lm_head.",
            "audio_tower.": "model.audio_tower.",
            "multi_modal_projector.": "model.multi_modal_projector.",
        }
    }

    def _check(self, config: Mapping[str, Any]) -> None:
        super()._check(config)
        audio: Mapping[str, Any] = config[self.tower_config]
        key = next((key for key in ("encoder_layerdrop", "layerdrop") if audio.get(key)), None)
        if key:
            raise ConfigError(
                [f"{self.tower_config}.{key}={audio[key]} is not supported: set it to 0"]
            )


def _tower_mappings(parts: tuple[str, ...]) -> list[MegatronParamMapping]:
    """Map each part both as a parameter and as a module; a model has one of the two."""
    part_mappings = [ReplicatedMapping(f"vision.{part}.**", f"{part}.**") for part in parts]
    return [*part_mappings, *(ReplicatedMapping(f"vision.{part}", part) for part in parts)]


def renamed(
    mappings: Iterable[MegatronParamMapping], prefixes: Prefixes
) -> MegatronMappingRegistry:
    def hf(name: str) -> str:
        return _with_stored_prefix(name, prefixes)

    return MegatronMappingRegistry(
        *(mapping.renamed(lambda name: name, hf) for mapping in mappings)
    )


def _with_stored_prefix(name: str, prefixes: Prefixes) -> str:
    """Return ``name`` with its prefix in a checkpoint."""
    longest = max((prefix for prefix in prefixes if name.startswith(prefix)), key=len, default="")
    return prefixes.get(longest, "") + name[len(longest) :]


def _without_mrope(rope: dict[str, Any]) -> dict[str, Any]:
    text_rope = {key: value for key, value in rope.items() if key not in _MROPE}
    if text_rope.get("type") == "mrope":  # older name of rope_type
        del text_rope["type"]
    return text_rope


def _unknown_vision_keys(
    config: Mapping[str, Any], tower_config: str, harmless: HarmlessKeys
) -> dict[str, str]:
    """Return a phrase for each key of the config or its ``tower_config`` that transformers' class does not have."""
    repeated = {key: config[key] for key in _TWICE if key in config}
    vision_config: dict[str, Any] = config[tower_config]
    smallest_vision = {
        key: value for key, value in vision_config.items() if key == "model_type" or key in repeated
    }
    smallest = {"model_type": config["model_type"], **repeated, tower_config: smallest_vision}
    known = hf_config(smallest).to_dict()
    # a class without the key ties nothing
    unclaimed = {
        key: value
        for key, value in config.items()
        if key not in known and (key, value) != (_TIED, False)
    }
    other_vision = {
        key: value for key, value in vision_config.items() if key not in known[tower_config]
    }
    problems = unknown_keys((), unclaimed, {**IRRELEVANT, **_HARMLESS, **harmless})
    in_vision = unknown_keys((), other_vision, {**IRRELEVANT, **_HARMLESS_IN_VISION, **harmless})
    return {
        **problems,
        **{
            f"{tower_config}.{key}": f"{tower_config}: {phrase}"
            for key, phrase in in_vision.items()
        },
    }
