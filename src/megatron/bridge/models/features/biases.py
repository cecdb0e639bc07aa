# SPDX-License-Identifier: Apache-2.0
"""Biases on only one part of a layer.

Megatron-Core has one switch for the output projection and the feed-forward layer, but some architectures have a bias on
only one of them. The other bias is removed after the model was built, so it is neither trained nor saved.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

from megatron.bridge.models.features.feature import LayerFeature
from megatron.bridge.utils.errors import UserError

_PARTS = {
    "attention_bias": ("linear_qkv", "linear_proj"),
    "attention_output_bias": ("linear_proj",),
    "mlp_bias": ("linear_fc1", "linear_fc2"),
}
"""Switch -> the linear layers that it is about."""


@dataclass
class BiasFields:
    output_bias: bool = False
    """The output layer has a bias."""
    attention_bias: bool | None = None
    """Biases of attention's projections; None follows ``add_bias_linear``, False removes them."""
    attention_output_bias: bool | None = None
    """Bias of attention's output projection; overrides ``attention_bias``."""
    mlp_bias: bool | None = None
    """Biases of the feed-forward layers; None follows ``add_bias_linear``, False removes them."""


class BiasFeature(LayerFeature):
    pricing = {
        "output_bias": "modules",
        "attention_bias": "modules",
        "attention_output_bias": "modules",
        "mlp_bias": "modules",
    }

    def change_model(self, model: nn.Module, config: Any) -> None:
        apply_biases(model, config)
        apply_output_bias(model, config)


def apply_biases(model: Any, config: Any) -> None:
    """Remove the biases that the switches of ``_PARTS`` in ``config`` turn off."""
    if config.attention_output_bias and not config.add_bias_linear:
        _add_to_output_projections(model, config)
    for name in _PARTS:
        has_bias = getattr(config, name)
        if name == "attention_output_bias" and has_bias:
            continue
        if has_bias and not config.add_bias_linear:
            raise UserError(
                f"{name}=True has no effect with add_bias_linear=False: set model.add_bias_linear=True"
            )
        if has_bias is False and config.add_bias_linear:
            for linear in _linears_of_part(
                model, name, keep_output=bool(config.attention_output_bias)
            ):
                _remove_bias(linear, name)


def _add_to_output_projections(model: nn.Module, config: Any) -> None:
    for layer in model.modules():
        if isinstance(layer, TransformerLayer) and hasattr(layer.self_attention, "linear_proj"):
            linear: Any = layer.self_attention.linear_proj
            _refuse_transformer_engine(linear, "attention_output_bias")
            bias: Any = nn.Parameter(torch.zeros_like(linear.weight[:, 0]))
            bias.sequence_parallel = (
                config.sequence_parallel
            )  # each rank adds it to its own positions
            bias.allreduce = True
            linear.bias = bias


def apply_output_bias(model: Any, config: Any) -> None:
    """Add a bias to the output layer of ``model`` (a ``GPTModel``) if ``config.output_bias`` is set."""
    output = getattr(model, "output_layer", None)
    if not config.output_bias or output is None:
        return
    like = next(model.parameters())
    zeros = torch.zeros(
        output.output_size_per_partition, dtype=config.params_dtype, device=like.device
    )
    bias: Any = nn.Parameter(zeros)
    set_tensor_model_parallel_attributes(bias, True, 0, 1)
    bias.allreduce = True
    output.bias = bias


def _linears_of_part(model: nn.Module, name: str, keep_output: bool) -> Iterator[nn.Module]:
    for layer in model.modules():  # those of multi-token prediction too
        if not isinstance(layer, TransformerLayer):
            continue
        if name == "mlp_bias" and layer.is_moe_layer:
            raise UserError(
                "mlp_bias=False cannot leave out the biases of experts that add_bias_linear=True asks for: use "
                "add_qkv_bias=True and add_bias_linear=False if only the projections of attention have biases"
            )
        part = layer.mlp if name == "mlp_bias" else layer.self_attention
        for linear in _PARTS[name]:
            if hasattr(part, linear) and not (keep_output and linear == "linear_proj"):
                yield getattr(part, linear)


def _remove_bias(linear: nn.Module, name: str) -> None:
    _refuse_transformer_engine(linear, name)
    linear.bias = None  # type: ignore[assignment]


def _refuse_transformer_engine(linear: nn.Module, name: str) -> None:
    if type(linear).__name__.startswith("TE"):
        raise UserError(
            f"{name} cannot be set apart with backend='transformer_engine': set model.backend='torch'"
        )
