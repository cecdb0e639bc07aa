# SPDX-License-Identifier: Apache-2.0
"""The output of each layer is multiplied by a number that is not trained (Gemma 4)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from megatron.bridge.models.features.feature import (
    WITHOUT_WHOLE_LAYERS,
    LayerFeature,
    clashes,
)


@dataclass
class LayerScaleFields:
    layer_scales: bool = False
    """The output of each layer is multiplied by a number that is not trained."""


class LayerScaleFeature(LayerFeature):
    switches = {"layer_scales": False}
    plain_layers_only = True
    pricing = {"layer_scales": "modules"}

    def check(self, config: Any) -> Iterator[str]:
        yield from clashes(config, "layer_scales", WITHOUT_WHOLE_LAYERS)

    def change_model(self, model: nn.Module, config: Any) -> None:
        if not config.layer_scales:
            return
        for layer in model.modules():
            if isinstance(layer, TransformerLayer):
                device = next(layer.parameters()).device
                scale = torch.ones(1, dtype=config.params_dtype, device=device)
                layer.register_buffer("layer_scale", scale)
                layer.register_forward_hook(_scale_output)


def _scale_output(layer: Any, _: Any, outputs: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
    stream, context = outputs
    return stream * layer.layer_scale, context
