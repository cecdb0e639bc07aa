# SPDX-License-Identifier: Apache-2.0
"""Registry of the mappings of one architecture, with lookup by names of either side."""

import re

from megatron.bridge.models.conversion.mappings import patterns
from megatron.bridge.models.conversion.param_mapping import AutoMapping, MegatronParamMapping

_NUMBER = re.compile(r"\d+")
_NEAR_WILDCARD = re.compile(r"\d*(\*+)\d*")


def _pattern_kind(pattern: str) -> str:
    """Return a pattern that matches, with numbers replaced by 0, every name that ``pattern`` matches."""
    return _NUMBER.sub("0", _NEAR_WILDCARD.sub(r"\1", pattern))


class MegatronMappingRegistry:
    """An ordered set of mappings; names may contain wildcards.

    Args:
        *mappings: one per Megatron name. Several may share a Hugging Face name, because layer specs use different
            Megatron names for a parameter; a model has one of them. One that repeats an earlier one is left out.

    Raises:
        ValueError: two mappings have the same Megatron name and other Hugging Face tensors.
    """

    def __init__(self, *mappings: MegatronParamMapping) -> None:
        by_name: dict[str, MegatronParamMapping] = {}
        twice: list[str] = []
        for mapping in mappings:
            first = by_name.setdefault(mapping.megatron_param, mapping)
            repeats = type(mapping) in (type(first), AutoMapping)
            if not repeats or mapping.hf_param != first.hf_param:
                twice.append(mapping.megatron_param)
        if twice:
            raise ValueError(f"mapped more than once: {', '.join(twice)}")
        self._mappings = tuple(by_name.values())
        # most names contain a layer index; the others are looked up directly
        self._exact = {
            m.megatron_param: m for m in self._mappings if patterns.is_concrete(m.megatron_param)
        }
        self._wild = [m for m in self._mappings if not patterns.is_concrete(m.megatron_param)]
        self._candidates: dict[str, list[MegatronParamMapping]] = {}

    def megatron_to_hf_lookup(self, megatron_param: str) -> MegatronParamMapping | None:
        """Return the mapping of a concrete Megatron name with its wildcards resolved, or None."""
        if megatron_param in self._exact:
            return self._exact[megatron_param]
        for mapping in self._like(megatron_param):
            captures = patterns.match(mapping.megatron_param, megatron_param)
            if captures is not None:
                return mapping.resolve(captures)
        return None

    def _like(self, megatron_param: str) -> list[MegatronParamMapping]:
        """Return the mappings that may match, cached for names that differ only in layer and expert."""
        kind = _NUMBER.sub("0", megatron_param)
        if kind not in self._candidates:
            self._candidates[kind] = [
                m for m in self._wild if patterns.match(_pattern_kind(m.megatron_param), kind)
            ]
        return self._candidates[kind]

    def hf_to_megatron_lookup(self, hf_param: str) -> MegatronParamMapping | None:
        """Return the first mapping of a concrete Hugging Face name with its wildcards resolved, or None.

        Of a tensor that stacks all experts, this is the mapping of the first expert.
        """
        for mapping in self._mappings:
            for name in mapping.hf_names:
                captures = patterns.match(name, hf_param)
                if captures is None:
                    continue
                return mapping.resolve((*captures, "0") if mapping.is_stacked else captures)
        return None

    def get_all_mappings(self) -> list[MegatronParamMapping]:
        return list(self._mappings)

    def with_changes(
        self, before: "MegatronMappingRegistry", after: "MegatronMappingRegistry"
    ) -> "MegatronMappingRegistry":
        """Return this registry with what ``after`` adds to ``before``, or maps in another way."""
        earlier = {mapping.megatron_param: repr(mapping) for mapping in before.get_all_mappings()}
        mappings = {mapping.megatron_param: mapping for mapping in self._mappings}
        for mapping in after.get_all_mappings():
            if earlier.get(mapping.megatron_param) != repr(mapping):
                mappings[mapping.megatron_param] = mapping
        return MegatronMappingRegistry(*mappings.values())

    def get_mappings_by_pattern(self, pattern: str) -> list[MegatronParamMapping]:
        """Return the mappings whose Megatron name matches ``pattern``; ``*`` also matches a ``*``."""
        return [m for m in self._mappings if patterns.match(pattern, m.megatron_param) is not None]

    def describe(self) -> str:
        """Return a table of Megatron names, kinds, and Hugging Face names."""
        width = max((len(m.megatron_param) for m in self._mappings), default=0)
        kinds = max((len(type(m).__name__) for m in self._mappings), default=0)
        return "\n".join(
            f"{m.megatron_param:<{width}}  {type(m).__name__:<{kinds}}  {', '.join(m.hf_names)}"
            for m in self._mappings
        )

    def __len__(self) -> int:
        return len(self._mappings)
