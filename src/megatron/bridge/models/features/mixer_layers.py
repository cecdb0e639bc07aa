# SPDX-License-Identifier: Apache-2.0
"""The base of features that replace attention by another mixer in some layers of a decoder."""

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

from megatron.core.models.backends import BackendSpecProvider
from megatron.core.ssm.mamba_mixer import MambaMixerSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from megatron.bridge.backends.recurrent.tensor_parallel_mixer import TensorParallelMixer
from megatron.bridge.backends.specs.torch_spec import TorchSpecProvider
from megatron.bridge.models.features.feature import (
    LayerFeature,
    differing,
    indivisible_by_context,
    indivisible_sizes,
)

MADE_FOR_ATTENTION: dict[str, Any] = {
    "norm_placement": "pre",
    "qk_norm_across_heads": False,
    "qk_norm_by_head": False,
    "qk_norm_after_rope": False,
    "parallel_residual": None,
    "attn_logit_softcapping": None,
    "multi_latent_attention": False,
}
"""Settings of layers with attention -> the value with which they change nothing."""


class MixerFeature(LayerFeature):
    """Layers with a mixer instead of attention; a model has mixers of one kind.

    Attributes:
        field: The field that lists the layers, with a 1 for each that has the mixer.
        all_fields: Those of all subclasses.
    """

    field: ClassVar[str]
    all_fields: ClassVar[list[str]] = []

    def __init_subclass__(cls) -> None:
        """Remember the field, which other mixers exclude."""
        super().__init_subclass__()
        cls.all_fields.append(cls.field)

    def mixer_class(self, config: Any) -> type:
        """Return the class of the mixer, which takes ``MambaMixerSubmodules`` as its submodules."""
        raise NotImplementedError

    def split_sizes(self, config: Any) -> tuple[str, ...]:
        """Return the names of the sizes that tensor-parallel ranks split, and context-parallel ones the first."""
        raise NotImplementedError

    def required(self, config: Any) -> dict[str, Any]:
        """Return the settings that the layers need, and their values."""
        other_mixers = [name for name in self.all_fields if name != self.field]
        return {
            **MADE_FOR_ATTENTION,
            **dict.fromkeys(other_mixers),
            "mamba_beside_attention": None,
            "experimental_attention_variant": None,
            "mtp_num_layers": None,
        }

    def check(self, config: Any) -> Iterator[str]:
        if not any(getattr(config, self.field) or ()):
            return
        yield from indivisible_sizes(config, self.split_sizes(config), self.field)
        # ranks exchange tokens for the features of the first size
        yield from indivisible_by_context(config, self.split_sizes(config)[:1], self.field)
        yield from differing(config, self.required(config), f"with {self.field}")

    def derive(self, config: Any) -> None:
        # layers that differ are saved one by one; Megatron-Core knows that of its own kinds of layers
        if getattr(config, self.field) is not None:
            config.hetereogenous_dist_checkpoint = True

    def change_layer_spec(
        self, spec: ModuleSpec, config: Any, layer_number: int | None, provider: BackendSpecProvider
    ) -> ModuleSpec:
        layers = getattr(config, self.field)
        if layers is None or layer_number is None or not layers[layer_number - 1]:
            return spec
        parts = spec.submodules
        assert isinstance(parts, TransformerLayerSubmodules)
        first: Any  # also normalizes its input where Transformer Engine's layers have no norm before them
        if isinstance(provider, TorchSpecProvider):
            first = provider.column_parallel_linear()
        else:
            first = provider.column_parallel_layer_norm_linear()
        mixer = ModuleSpec(
            module=self.mixer_class(config),
            submodules=MambaMixerSubmodules(first, provider.row_parallel_linear()),
        )
        names = dict(parts.sharded_state_dict_keys_map)
        if "input_layernorm." in names:
            names["input_layernorm."] = "self_attention.in_proj.layer_norm_"
        changed = dataclasses.replace(
            parts, self_attention=mixer, sharded_state_dict_keys_map=names
        )
        return dataclasses.replace(spec, submodules=changed)

    def operations(self, module: Any, length: int) -> float:
        return module.operations

    def scan_elements(self, module: Any, tokens: int) -> int:
        assert isinstance(module, TensorParallelMixer)
        return module.scan_numbers(tokens)
