# SPDX-License-Identifier: Apache-2.0
"""Multi-token prediction layers that a config declares but the model was built without.

transformers drops these layers when it saves a model, but keeps the config key that counts them, so most fine-tuned
copies on the hub declare layers that they do not store. Users may also build a model without the layers. In both cases,
an export has the same tensors as its source: none of these layers, or all of them, unchanged.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry

DECLARED_ONLY = (
    "{} declares layers of multi-token prediction but stores none of their tensors: the model is built without "
    "them (mtp_num_layers=None), and an export writes the same files"
)
LEFT_OUT = (
    "{} stores layers of multi-token prediction that the model is built without (mtp_num_layers=None): an export "
    "copies their tensors unchanged"
)


@dataclass(frozen=True)
class MTPLayers:
    """The layers that a config declares."""

    count: int
    registry: MegatronMappingRegistry  # the mappings of a model that has them

    @property
    def patterns(self) -> tuple[str, ...]:
        """Hugging Face names of the tensors in dense and expert layers."""
        mtp_mappings = (
            candidate
            for candidate in self.registry.get_all_mappings()
            if candidate.megatron_param.startswith("mtp.")
        )
        return tuple(name for mapping in mtp_mappings for name in mapping.hf_names)

    def are_in(self, names: Iterable[str]) -> bool:
        """Return whether ``names`` has any of the tensors."""
        prefixes = tuple(pattern.partition("*")[0] for pattern in self.patterns)
        return any(name.startswith(prefixes) for name in names)

    def tensors(self, parameters: Iterable[str], num_layers: int) -> list[str]:
        """Return the Hugging Face names of all tensors: the layers equal the last one of Megatron's ``parameters``."""
        last = f"decoder.layers.{num_layers - 1}."
        of_layer = [name.removeprefix(last) for name in parameters if name.startswith(last)]
        mappings = map(self.registry.megatron_to_hf_lookup, self._parameters(of_layer))
        return list(
            dict.fromkeys(
                name for mapping in mappings if mapping is not None for name in mapping.hf_names
            )
        )

    def _parameters(self, of_layer: list[str]) -> Iterator[str]:
        for depth in range(self.count):
            for name in ("enorm", "hnorm", "eh_proj", "final_layernorm"):
                yield f"mtp.layers.{depth}.{name}.weight"
            for name in of_layer:
                yield f"mtp.layers.{depth}.mtp_model_layer.{name}"


def declared_by(
    provider: Any, registry_for: Callable[[Any], MegatronMappingRegistry]
) -> MTPLayers | None:
    """Return the layers that ``provider`` declares, if any; ``registry_for`` returns the mappings of its model."""
    count = getattr(provider, "mtp_num_layers", None)
    return MTPLayers(count, registry_for(provider)) if count else None
