# SPDX-License-Identifier: Apache-2.0
"""Layers with Kimi delta attention instead of latent attention (Kimi Linear)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron.bridge.backends.recurrent.kimi_delta import KimiDeltaAttention
from megatron.bridge.models.features.feature import ToySizes
from megatron.bridge.models.features.gated_delta_net import toy_delta_sizes
from megatron.bridge.models.features.mixer_layers import MixerFeature


@dataclass
class KimiDeltaFields:
    kda_layers: list[int] | None = None
    """1 for each layer with Kimi delta attention, sized by ``linear_...``, instead of latent attention; None disables
    them."""


class KimiDeltaFeature(MixerFeature):
    field = "kda_layers"
    switches = {"kda_layers": None}
    per_layer = ("kda_layers",)
    prefixes = ("linear_", "linear_conv_kernel_dim")
    prefix_switch = "kda_layers"
    pricing = {"kda_layers": "modules"}
    modules = recurrent_modules = (KimiDeltaAttention,)

    def mixer_class(self, config: Any) -> type:
        return KimiDeltaAttention

    def split_sizes(self, config: Any) -> tuple[str, ...]:
        return ("linear_num_key_heads",)

    def required(self, config: Any) -> dict[str, Any]:
        return {
            **super().required(config),
            "multi_latent_attention": True,
            "linear_value_head_dim": config.linear_key_head_dim,
            "linear_num_value_heads": config.linear_num_key_heads,
        }

    def notes(self, config: Any) -> Iterator[str]:
        if any(config.kda_layers or ()):
            yield "activations of model.kda_layers are computed in PyTorch, which stores several times the estimate"

    def toy_sizes(self, config: Any, toy: ToySizes) -> dict[str, Any]:
        return {} if config.kda_layers is None else toy_delta_sizes(toy, values_per_key=1)
