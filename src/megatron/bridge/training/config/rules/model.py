# SPDX-License-Identifier: Apache-2.0
"""Rules on what the model computes."""

from collections.abc import Iterator

import torch.nn.functional as F

from megatron.bridge.training.config.rules.nearest_values import indivisible
from megatron.bridge.training.config.run_config import RunConfig


def heads_divide_width(config: RunConfig, world_size: int) -> Iterator[str]:
    """Heads divide the hidden size, unless ``kv_channels`` sets their size."""
    model = config.model
    if model.kv_channels is None and not model.multi_latent_attention:
        heads, also = model.unpadded_heads[0], ", or set model.kv_channels"
        yield from indivisible("model.num_attention_heads", heads, "model.hidden_size", model.hidden_size, also)


def rotary_width_is_even(config: RunConfig, world_size: int) -> Iterator[str]:
    """Rotary embedding rotates pairs, so the rotated part of a head is even."""
    model = config.model
    if getattr(model, "position_embedding_type", "rope") not in ("rope", "mrope") or model.multi_latent_attention:
        return
    head, percent = model.kv_channels or model.hidden_size // model.unpadded_heads[0], model.rotary_percent
    turned = int(head * percent)
    if turned % 2:
        yield (
            f"model.kv_channels={head} and model.rotary_percent={percent} rotate {turned} dimensions of a head, "
            f"which must be even: use model.kv_channels={head + 1}"
        )


def exact_gelu_is_not_fused(config: RunConfig, world_size: int) -> Iterator[str]:
    """Megatron-Core's fused GELU is the tanh approximation, which differs by up to 5e-4."""
    if config.model.bias_activation_fusion and config.model.activation_func is F.gelu:
        yield (
            "model.bias_activation_fusion=True computes GELU by its tanh approximation, and model.activation_func="
            "torch.nn.functional.gelu is the exact one: set model.bias_activation_fusion=false"
        )


def sequence_fits_model(config: RunConfig, world_size: int) -> Iterator[str]:
    """The model has no trained positions beyond its sequence length."""
    length, limit = config.dataset.seq_length, config.model.seq_length
    if length > limit:
        yield (
            f"dataset.seq_length={length} is longer than model.seq_length={limit}: lower it to {limit}, or raise "
            "model.seq_length"
        )
