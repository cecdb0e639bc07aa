# SPDX-License-Identifier: Apache-2.0
"""The modules of transformers' model that a layer of a Megatron model stands for."""

from types import SimpleNamespace
from typing import Any

from megatron.bridge.models.conversion.describe import architectures_of
from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.model_bridge import bridge_for
from megatron.bridge.utils.errors import UserError

_USUAL = "LlamaForCausalLM"  # whose names most models have


class HFModules:
    """Names of Hugging Face for the layers of one model.

    Args:
        config: The config of a chunk: its provider. One that no bridge made, such as that of a Megatron checkpoint, has
            the names of the architectures that compute the same.
    """

    def __init__(self, config: Any) -> None:
        self._registries = _hf_registries(config)

    def of_layer(self, layer: str) -> dict[str | None, tuple[str, ...]]:
        """Return role -> modules of the parts of a layer; the role of a layer that is one module is None."""
        modules_by_role: dict[str | None, tuple[str, ...]] = {}
        for registry in self._registries:
            mapping = registry.megatron_to_hf_lookup(f"{layer}.weight")
            mapping = mapping or registry.megatron_to_hf_lookup(f"{layer}.weight0")
            if mapping is None:
                continue
            hf_param = mapping.hf_param
            by_role = {None: hf_param} if isinstance(hf_param, str) else dict(hf_param)
            for role, hf_name in by_role.items():
                module = hf_name.removesuffix(".weight")
                modules_by_role[role] = tuple(
                    dict.fromkeys((*modules_by_role.get(role, ()), module))
                )
        return modules_by_role


def _hf_registries(config: Any) -> list[MegatronMappingRegistry]:
    source = getattr(getattr(config, "declared", config), "hf_config", None)
    if source is not None:
        sources = [source]
    else:
        names = _matching_architectures(config) or [_USUAL]
        sources = [SimpleNamespace(architectures=[name]) for name in names]
    bridges = [bridge_for(source) for source in sources]
    return [bridge.as_modules(bridge.registry_for(config)) for bridge in bridges]


def _matching_architectures(config: Any) -> list[str]:
    try:
        return architectures_of(config)
    except (UserError, AttributeError):  # a config that is no provider
        return []
