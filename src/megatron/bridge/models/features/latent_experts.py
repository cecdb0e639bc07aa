# SPDX-License-Identifier: Apache-2.0
"""Experts of a narrower width, between two projections that all tokens go through (Nemotron 3 Super)."""

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any

from megatron.core.models.backends import BackendSpecProvider
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron.bridge.backends.moe.latent_experts import LatentExperts
from megatron.bridge.backends.specs.torch_spec import TorchSpecProvider
from megatron.bridge.models.features.feature import LayerFeature, ToySizes


class LatentExpertsFeature(LayerFeature):
    """``moe_latent_size``, a field of Megatron-Core, which needs Transformer Engine for its own layers."""

    switches = {"moe_latent_size": None}
    pricing = {"moe_latent_size": "counted"}
    scales_with_width = ("moe_latent_size",)
    replicated_layers = ("fc1_latent_proj", "fc2_latent_proj")

    def check(self, config: Any) -> Iterator[str]:
        latent = config.moe_latent_size
        if not latent:
            return
        if not config.num_moe_experts:
            yield f"moe_latent_size={latent} has no effect without experts: set it to null"
        for name in ("add_bias_linear", "experts_beside_mlp", "moe_shared_expert_overlap"):
            if getattr(config, name):
                yield f"{name}=True does not work with moe_latent_size={latent}: set it to false"

    def change_layer_spec(
        self, spec: ModuleSpec, config: Any, layer_number: int | None, provider: BackendSpecProvider
    ) -> ModuleSpec:
        if not (config.moe_latent_size and isinstance(provider, TorchSpecProvider)):
            return spec
        layer: Any = spec.submodules
        if not (isinstance(layer.mlp, partial) and layer.mlp.func is MoELayer):
            return spec
        experts = partial(LatentExperts, *layer.mlp.args, **layer.mlp.keywords)
        return dataclasses.replace(spec, submodules=dataclasses.replace(layer, mlp=experts))

    def toy_sizes(self, config: Any, toy: ToySizes) -> dict[str, Any]:
        return {"moe_latent_size": toy.hidden_size // 2} if config.moe_latent_size else {}
