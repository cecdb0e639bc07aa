# SPDX-License-Identifier: Apache-2.0
"""Layers with a gated short convolution instead of attention (LFM2)."""

from dataclasses import dataclass
from typing import Any

from megatron.bridge.backends.recurrent.short_conv import ShortConv
from megatron.bridge.models.features.mixer_layers import MixerFeature


@dataclass
class ShortConvFields:
    short_conv_layers: list[int] | None = None
    """1 for each layer with a gated short convolution instead of attention, over ``linear_conv_kernel_dim``
    tokens; None disables them."""


class ShortConvFeature(MixerFeature):
    field = "short_conv_layers"
    switches = {"short_conv_layers": None}
    per_layer = ("short_conv_layers",)
    prefixes = ("linear_conv_kernel_dim",)
    prefix_switch = "short_conv_layers"
    pricing = {"short_conv_layers": "modules"}
    modules = recurrent_modules = (ShortConv,)

    def mixer_class(self, config: Any) -> type:
        return ShortConv

    def split_sizes(self, config: Any) -> tuple[str, ...]:
        return ("hidden_size",)
