# SPDX-License-Identifier: Apache-2.0
"""Biases on one part of a layer only.

Megatron-Core has one switch for the output projection and the feed-forward layer. Architectures differ between the
two; a bias that must not be there is removed after the model was built, so it is neither trained nor saved.
"""

from collections.abc import Iterator
from typing import Any

from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

from megatron.bridge.utils.errors import UserError


def apply_biases(model: Any, config: Any) -> None:
    """Remove the biases that ``config.attention_bias`` or ``config.mlp_bias`` switch off.

    Raises:
        UserError: a switch asks for biases that ``add_bias_linear=False`` leaves out, or the layers cannot do
            without the bias that they were built with.
    """
    for name in ("attention_bias", "mlp_bias"):
        wanted = getattr(config, name)
        if wanted and not config.add_bias_linear:
            raise UserError(
                f"{name}=True has no effect with add_bias_linear=False: set model.add_bias_linear=True"
            )
        if wanted is False and config.add_bias_linear:
            for linear in _linears(model, name):
                _remove(linear, name)


def _linears(model: nn.Module, name: str) -> Iterator[nn.Module]:
    for layer in model.modules():  # those of multi-token prediction too
        if not isinstance(layer, TransformerLayer):
            continue
        if name == "mlp_bias" and layer.is_moe_layer:
            raise UserError(
                "mlp_bias=False cannot leave out the biases of experts that add_bias_linear=True asks for: use "
                "add_qkv_bias=True and add_bias_linear=False if only the projections of attention have biases"
            )
        part = layer.self_attention if name == "attention_bias" else layer.mlp
        for linear in ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"):
            if hasattr(part, linear):
                yield getattr(part, linear)


def _remove(linear: nn.Module, name: str) -> None:
    if type(linear).__name__.startswith("TE"):
        raise UserError(f"{name} cannot be set apart with backend='transformer_engine': set model.backend='torch'")
    linear.bias = None  # type: ignore[assignment]
