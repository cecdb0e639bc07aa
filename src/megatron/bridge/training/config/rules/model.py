# SPDX-License-Identifier: Apache-2.0
"""Rules on what the model computes."""

import torch.nn.functional as F

from megatron.bridge.training.config.rules.nearest_values import divisors, near
from megatron.bridge.training.config.run_config import RunConfig


def heads_divide_width(config: RunConfig, world_size: int) -> str | None:
    """Heads divide the hidden size, unless ``kv_channels`` sets their size."""
    model = config.model
    heads = model.unpadded_heads[0]
    if model.kv_channels is not None or model.multi_latent_attention or model.hidden_size % heads == 0:
        return None
    return (
        f"model.num_attention_heads={heads} does not divide model.hidden_size={model.hidden_size}: use "
        f"{near(heads, divisors(model.hidden_size))}, or set model.kv_channels"
    )


def rotary_width_is_even(config: RunConfig, world_size: int) -> str | None:
    """Rotary embedding rotates pairs, so the rotated part of a head is even."""
    model = config.model
    if getattr(model, "position_embedding_type", "rope") not in ("rope", "mrope") or model.multi_latent_attention:
        return None
    head, percent = model.kv_channels or model.hidden_size // model.unpadded_heads[0], model.rotary_percent
    turned = int(head * percent)
    if turned % 2 == 0:
        return None
    return (
        f"model.kv_channels={head} and model.rotary_percent={percent} rotate {turned} dimensions of a head, "
        f"which must be even: use model.kv_channels={head + 1}"
    )


def exact_gelu_is_not_fused(config: RunConfig, world_size: int) -> str | None:
    """Megatron-Core's fused GELU is the tanh approximation, which differs by up to 5e-4."""
    model = config.model
    if not model.bias_activation_fusion or model.activation_func is not F.gelu:
        return None
    return (
        "model.bias_activation_fusion=True computes GELU by its tanh approximation, and "
        "model.activation_func=torch.nn.functional.gelu is the exact one: set model.bias_activation_fusion=false"
    )


def sequence_fits_model(config: RunConfig, world_size: int) -> str | None:
    """The model has no trained positions beyond its sequence length."""
    length, limit = config.dataset.seq_length, config.model.seq_length
    if length <= limit:
        return None
    return (
        f"dataset.seq_length={length} is longer than model.seq_length={limit}: lower it to {limit}, or raise "
        "model.seq_length"
    )


def one_half_precision(config: RunConfig, world_size: int) -> str | None:
    """bf16 and fp16 exclude each other."""
    if not (config.model.bf16 and config.model.fp16):
        return None
    return "model.bf16=True and model.fp16=True exclude each other: switch one off, or set mixed_precision"


def per_token_loss_is_summed(config: RunConfig, world_size: int) -> str | None:
    """Gradients are divided by the number of tokens at the end, so the collective must sum."""
    if not (config.model.calculate_per_token_loss and config.ddp.average_in_collective):
        return None
    return (
        "ddp.average_in_collective=True cannot be used with model.calculate_per_token_loss=True: switch the "
        "first off"
    )


def no_partial_checkpointing(config: RunConfig, world_size: int) -> str | None:
    """Megatron-Core would pass forward steps an argument that they do not accept."""
    value = config.model.num_microbatches_with_partial_activation_checkpoints
    if value is None:
        return None
    return (
        f"model.num_microbatches_with_partial_activation_checkpoints={value}: not available in this version, use "
        "model.recompute_granularity"
    )
