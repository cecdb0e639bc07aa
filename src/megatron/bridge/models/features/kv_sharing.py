# SPDX-License-Identifier: Apache-2.0
"""Keys and values that layers share, keys that serve as values, and heads of two sizes (Gemma 4)."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from megatron.core.models.backends import BackendSpecProvider
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import nn

from megatron.bridge.backends.specs.kv_sharing import (
    SharedKVAttention,
    connect_shared_kv,
    has_window,
)
from megatron.bridge.models.features.feature import (
    RECOMPUTED_LAYERS,
    WITHOUT_WHOLE_LAYERS,
    Clash,
    LayerFeature,
    ToySizes,
    clashes,
)
from megatron.bridge.utils.config.ranges import AT_LEAST_ONE

_OTHER_NORMS = ("qk_norm_across_heads", "qk_norm_by_head", "qk_norm_after_rope")


@dataclass
class KVSharingFields:
    value_norm: bool = False
    """Values pass an RMSNorm without a gain (``backend='torch'`` only, like all that depends on it here)."""
    attention_k_eq_v: bool = False
    """Under ``value_norm``, values are the projected keys in layers without a window."""
    shared_kv_layers: list[int] | None = None
    """KV sharing, under ``value_norm``: 1 for each layer that attends to the keys and values of the last layer of its
    kind (with a window, or without one) that projects its own; None has no such layer."""
    shared_kv_wide_mlp: bool = False
    """Layers without keys and values of their own have feed-forward layers of twice the width."""
    global_kv_channels: Annotated[int | None, AT_LEAST_ONE] = None
    """Width of the heads of layers without a window; None is ``kv_channels``."""
    global_query_groups: Annotated[int | None, AT_LEAST_ONE] = None
    """Key and value heads of layers without a window; None is ``num_query_groups``."""


class KVSharingFeature(LayerFeature):
    switches = {"value_norm": False, "global_kv_channels": None, "global_query_groups": None}
    plain_layers_only = True
    per_layer = ("shared_kv_layers",)
    needs = {
        "attention_k_eq_v": "value_norm",
        "shared_kv_layers": "value_norm",
        "shared_kv_wide_mlp": "shared_kv_layers",
        "global_kv_channels": "local_rope_parameters",
    }
    pricing = {
        "value_norm": "modules",
        "attention_k_eq_v": "modules",
        "shared_kv_layers": "modules",
        "shared_kv_wide_mlp": "modules",
        "global_kv_channels": "modules",
        "global_query_groups": "modules",
    }

    def check(self, config: Any) -> Iterator[str]:
        shared = (RECOMPUTED_LAYERS, *WITHOUT_WHOLE_LAYERS)
        yield from clashes(config, "shared_kv_layers", shared)
        fused = Clash(
            "fused_single_qkv_rope", True, "values are normed before they are joined; switch it off"
        )
        yield from clashes(config, "value_norm", (fused,))
        if config.value_norm:
            yield from _check_attention(config)

    def derive(self, config: Any) -> None:
        """Mark layers that differ in size."""
        config.heterogeneous_block_specs |= bool(
            config.global_kv_channels
            or config.global_query_groups
            or config.shared_kv_layers
            or (config.value_norm and config.attention_k_eq_v)
        )

    def change_layer_config(self, config: Any, original: Any, layer_number: int) -> None:
        if not has_window(original, layer_number):
            config.kv_channels = original.global_kv_channels or original.kv_channels
            config.num_query_groups = original.global_query_groups or original.num_query_groups
            config._unpadded_heads = (
                original.num_attention_heads,
                config.num_query_groups or original.num_attention_heads,
            )
        shared = original.shared_kv_layers
        if original.shared_kv_wide_mlp and shared and shared[layer_number - 1]:
            config.ffn_hidden_size = 2 * (original.ffn_hidden_size or 0)

    def change_layer_spec(
        self, spec: ModuleSpec, config: Any, layer_number: int | None, provider: BackendSpecProvider
    ) -> ModuleSpec:
        if not config.value_norm:
            return spec
        layer: Any = spec.submodules
        attention = dataclasses.replace(layer.self_attention, module=SharedKVAttention)
        changed = dataclasses.replace(layer, self_attention=attention)
        return dataclasses.replace(spec, submodules=changed)

    def change_model(self, model: nn.Module, config: Any) -> None:
        connect_shared_kv(model, config)

    def toy_sizes(self, config: Any, toy: ToySizes) -> dict[str, Any]:
        sizes: dict[str, Any] = {}
        if config.global_kv_channels:
            sizes["global_kv_channels"] = 2 * toy.head_dim
        if config.global_query_groups:
            sizes["global_query_groups"] = toy.query_groups
        return sizes


def _check_attention(config: Any) -> Iterator[str]:
    """Yield what layers with ``value_norm`` exclude: query groups of padding, and fewer groups than ranks."""
    if config.backend == "transformer_engine":
        yield (
            "value_norm=True does not work with backend='transformer_engine', whose attention projects queries, "
            "keys and values alike in every layer: set model.backend='torch'"
        )
    if config.make_query_groups_divisible_by > 1:
        yield "value_norm=True does not work with padded heads: set model.make_query_groups_divisible_by=1"
    if config.multi_latent_attention or any(getattr(config, name) for name in _OTHER_NORMS):
        yield (
            "value_norm=True excludes multi_latent_attention and all norms of queries and keys but qk_layernorm: "
            "set only one"
        )
    ranks = config.tensor_model_parallel_size
    groups = config.global_query_groups or config.num_query_groups or config.num_attention_heads
    width = config.global_kv_channels or config.kv_channels or 1
    rows = (config.num_attention_heads + groups) * width
    cuts_rows = config.attention_k_eq_v and bool(rows % ranks)
    if groups % ranks and (ranks % groups or cuts_rows):
        yield (
            f"tensor_model_parallel_size={ranks} does not divide the {groups} key heads of layers without a "
            "window: choose a size that does"
        )
