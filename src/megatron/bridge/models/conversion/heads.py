# SPDX-License-Identifier: Apache-2.0
"""Models with another head than a language model's: classes, names of tensors, and the config of an export.

A classification or embedding class of transformers is the decoder of its causal class with a different last layer.
The bridge of the causal class converts it, and this module replaces the last mapping.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.param_mapping import AutoMapping
from megatron.bridge.models.hf_pretrained.safetensors_files import TensorEntry
from megatron.bridge.utils.errors import UserError

_TABLES = {
    "sequence_classification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "token_classification": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "embedding": "MODEL_MAPPING_NAMES",
}
"""Heads, and transformers' tables from a ``model_type`` to the class with this head."""
_OUTPUT = "output_layer."
_CLASSIFIER = ("GPT2ForTokenClassification", "GPTNeoXForTokenClassification")
"""Classes whose head is called ``classifier``; in all others it is called ``score``."""
IRRELEVANT_WITH_HEAD: dict[str, tuple[Any, ...] | None] = {"classifier_dropout": None}


class HeadedClass(NamedTuple):
    """A transformers class with a head."""

    head: str
    causal: str  # the class of the same decoder with an output layer


def headed_class(architecture: str, model_type: str | None) -> HeadedClass | None:
    """Return the description of ``architecture`` if it is a transformers class with a head."""
    causal = _model_table("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES").get(model_type)
    matching_heads = [
        head
        for head, table in _TABLES.items()
        if _model_table(table).get(model_type) == architecture
    ]
    return (
        HeadedClass(matching_heads[0], causal)
        if matching_heads and isinstance(causal, str)
        else None
    )


def architecture_of(head: str, model_type: str | None) -> str:
    """Return the transformers class for ``head``."""
    architecture = _model_table(_TABLES[head]).get(model_type)
    if not isinstance(architecture, str):
        raise UserError(
            f"model.head={head}: transformers has no such class for model_type={model_type}, so the model cannot be "
            "exported to Hugging Face: use another architecture"
        )
    return architecture


def _model_table(name: str) -> Mapping[str | None, Any]:
    from transformers.models.auto import modeling_auto

    return getattr(modeling_auto, name)


def read(head: str | None, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the provider's attributes for a model of a class with ``head``."""
    if head is None:
        return {}
    return {
        "head": head,
        "num_labels": None if head == "embedding" else len(config.get("id2label") or (0, 1)),
    }


def with_head(
    registry: MegatronMappingRegistry, config: Any, model_type: str | None
) -> MegatronMappingRegistry:
    """Return ``registry`` with the head of the provider ``config`` in place of the output layer."""
    if getattr(config, "head", None) is None:
        return registry
    decoder_mappings = [
        mapping
        for mapping in registry.get_all_mappings()
        if not mapping.megatron_param.startswith(_OUTPUT)
    ]
    if config.head == "embedding":
        return MegatronMappingRegistry(*decoder_mappings)
    name = "classifier" if architecture_of(config.head, model_type) in _CLASSIFIER else "score"
    head_mappings = (
        AutoMapping(f"{_OUTPUT}{part}", f"{name}.{part}") for part in ("weight", "bias")
    )
    return MegatronMappingRegistry(*decoder_mappings, *head_mappings)


def output_tensors(registry: MegatronMappingRegistry) -> frozenset[str]:
    """Return the Hugging Face names of the output layer, which a head replaces."""
    outputs = (
        candidate
        for candidate in registry.get_all_mappings()
        if candidate.megatron_param.startswith(_OUTPUT)
    )
    return frozenset(name for mapping in outputs for name in mapping.hf_names)


def without_prefix(
    registry: MegatronMappingRegistry, entries: Mapping[str, TensorEntry]
) -> MegatronMappingRegistry:
    """Return ``registry`` for a checkpoint of the bare decoder, whose names lack the prefix ``model.``."""
    names = [name for mapping in registry.get_all_mappings() for name in mapping.hf_names]
    prefix = next(
        (name.partition(".")[0] + "." for name in names if ".layers." in name or ".h." in name), ""
    )
    bare = {
        name.removeprefix(prefix).partition(".")[0] for name in names if name.startswith(prefix)
    }
    if any(name.startswith(prefix) for name in entries) or not any(
        n.partition(".")[0] in bare for n in entries
    ):
        return registry
    mappings = registry.get_all_mappings()
    return MegatronMappingRegistry(
        *(item.renamed(str, lambda name: name.removeprefix(prefix)) for item in mappings)
    )


def changed_keys(provider: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return new values for the keys of a Hugging Face ``config`` that do not describe the head of ``provider``."""
    if getattr(provider, "head", None) is None:
        return {}
    changed: dict[str, Any] = {
        "architectures": [architecture_of(provider.head, config.get("model_type"))]
    }
    names: list[str] | None = provider.label_names
    if (
        names is None
        and provider.num_labels is not None
        and len(config.get("id2label") or (0, 1)) != provider.num_labels
    ):
        names = [f"LABEL_{label_id}" for label_id in range(provider.num_labels)]
    if names is not None:
        changed["id2label"] = {str(label_id): label for label_id, label in enumerate(names)}
        changed["label2id"] = {label: label_id for label_id, label in enumerate(names)}
    return {key: value for key, value in changed.items() if config.get(key) != value}
