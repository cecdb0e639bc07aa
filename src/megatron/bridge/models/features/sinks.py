# SPDX-License-Identifier: Apache-2.0
"""Attention sinks, by Megatron-Core's own setting (GPT-OSS)."""

from typing import Any

from torch import nn

from megatron.bridge.backends.specs.layer_features import mark_sinks
from megatron.bridge.models.features.feature import LayerFeature


class SinkFeature(LayerFeature):
    switches = {"softmax_type": "vanilla"}
    pricing = {"softmax_type": "unpriced"}

    def change_model(self, model: nn.Module, config: Any) -> None:
        mark_sinks(model)
