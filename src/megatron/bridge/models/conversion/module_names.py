# SPDX-License-Identifier: Apache-2.0
"""Checkpoints under the names of transformers' modules instead of the names that a family was published with.

Since version 5, transformers renames tensors and stacks experts when it loads a model; a state dict, or
``save_pretrained(save_original_format=False)``, has the new names.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from megatron.bridge.models.conversion.declare.moe import stacked_mapping
from megatron.bridge.models.conversion.engine.plan import EMBEDDING
from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.param_mapping import MegatronParamMapping
from megatron.bridge.models.hf_pretrained import transformers_reads

_STACKED = re.compile(r"\.experts\.(gate_up_proj|up_proj|down_proj)$")
_EXPERT = re.compile(r"\.experts\.\*\.")
_STAND_IN = 900_000
"""A number instead of the first wildcard of a name; the next ones follow it."""


def follow_module_names(
    registry: MegatronMappingRegistry, names: Iterable[str], hf_config: Mapping[str, Any]
) -> MegatronMappingRegistry:
    """Return ``registry`` for a checkpoint with stacked experts whose family stores them one by one.

    Args:
        registry: mappings under the names that the family was published with.
        names: the checkpoint's tensors.
        hf_config: the Hugging Face config, as a dict.

    Returns:
        The mappings under the names of transformers' modules if the checkpoint has such names, else ``registry``.
    """
    if not _has_other_names(registry, set(names)):
        return registry
    rename = transformers_reads.renaming(hf_config)
    if rename is None:
        return registry

    def rename_pattern(pattern: str) -> str:
        """Rename a pattern as if its wildcards were indices."""
        parts = pattern.split("*")
        concrete = parts[0]
        for index, part in enumerate(parts[1:]):
            concrete += f"{_STAND_IN + index}{part}"
        return re.sub(rf"{_STAND_IN // 10}\d", "*", rename(concrete))

    def rename_mapping(mapping: MegatronParamMapping) -> MegatronParamMapping:
        renamed = {rename_pattern(name) for name in mapping.hf_names}
        of_expert = all(_EXPERT.search(name) for name in mapping.hf_names)
        if of_expert and len(renamed) == 1 and _STACKED.search(target := renamed.pop()):
            return stacked_mapping(mapping.megatron_param, target)
        return mapping.renamed(str, rename_pattern)

    return MegatronMappingRegistry(*map(rename_mapping, registry.get_all_mappings()))


def _has_other_names(registry: MegatronMappingRegistry, names: set[str]) -> bool:
    """Return whether the embedding, or the experts, have names that the registry does not know."""
    embedding = registry.megatron_to_hf_lookup(EMBEDDING)
    if names and embedding is not None and names.isdisjoint(embedding.hf_names):
        return True
    stacked = (name for name in names if _STACKED.search(name))
    return any(registry.hf_to_megatron_lookup(name) is None for name in stacked)
