# SPDX-License-Identifier: Apache-2.0
"""Layers with experts have a dense feed-forward layer as well (Gemma 4)."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron.core.models.backends import BackendSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron.bridge.backends.moe.experts_beside_mlp import ExpertsBesideMLP
from megatron.bridge.models.features.feature import (
    WITHOUT_WHOLE_LAYERS,
    LayerFeature,
    clashes,
)


@dataclass
class ExpertsBesideMLPFields:
    experts_beside_mlp: bool = False
    """Layers with experts have a dense feed-forward layer as well, and norms before and after both."""


class ExpertsBesideMLPFeature(LayerFeature):
    switches = {"experts_beside_mlp": False}
    plain_layers_only = True
    needs = {"experts_beside_mlp": "num_moe_experts"}
    pricing = {"experts_beside_mlp": "modules"}

    def check(self, config: Any) -> Iterator[str]:
        yield from clashes(config, "experts_beside_mlp", WITHOUT_WHOLE_LAYERS)
        if config.experts_beside_mlp and "moe" in (config.recompute_modules or ()):
            yield "recompute_modules=['moe'] does not work with experts_beside_mlp=True: remove 'moe'"

    def change_layer_spec(
        self, spec: ModuleSpec, config: Any, layer_number: int | None, provider: BackendSpecProvider
    ) -> ModuleSpec:
        """Put a dense feed-forward layer beside the experts, which normalize their own inputs."""
        layer: Any = spec.submodules
        experts = layer.mlp
        has_experts = isinstance(experts, partial) and experts.func is MoELayer
        if not (config.experts_beside_mlp and has_experts):
            return spec
        both = partial(
            ExpertsBesideMLP,
            *experts.args,
            **experts.keywords,
            dense=get_mlp_module_spec_for_backend(provider),
        )
        changed = dataclasses.replace(layer, mlp=both, pre_mlp_layernorm=IdentityOp)
        return dataclasses.replace(spec, submodules=changed)
