# SPDX-License-Identifier: Apache-2.0
"""Rules on what is computed."""

import torch.nn.functional as F

from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.rules.words import divisors, near


def exact_gelu_is_not_fused(config: ConfigContainer, world_size: int) -> str | None:
    """Megatron-Core's fused GELU is the tanh approximation: up to 5e-4 off, without an error."""
    model = config.model
    if not model.bias_activation_fusion or model.activation_func is not F.gelu:
        return None
    return (
        "model.bias_activation_fusion=True computes GELU by its tanh approximation, and "
        "model.activation_func=torch.nn.functional.gelu is the exact one: set model.bias_activation_fusion=false"
    )


def heads_divide_width(config: ConfigContainer, world_size: int) -> str | None:
    """Unless heads have a width of their own."""
    model = config.model
    heads = model.unpadded_heads[0]
    if model.kv_channels is not None or model.multi_latent_attention or model.hidden_size % heads == 0:
        return None
    return (
        f"model.num_attention_heads={heads} does not divide model.hidden_size={model.hidden_size}: use "
        f"{near(heads, divisors(model.hidden_size))}, or set model.kv_channels"
    )


def rotary_width_is_even(config: ConfigContainer, world_size: int) -> str | None:
    """Numbers of a head turn in pairs: an odd one out fails in the first step."""
    model = config.model
    if getattr(model, "position_embedding_type", "rope") not in ("rope", "mrope") or model.multi_latent_attention:
        return None
    head, percent = model.kv_channels or model.hidden_size // model.unpadded_heads[0], model.rotary_percent
    turned = int(head * percent)
    if turned % 2 == 0:
        return None
    return (
        f"model.kv_channels={head} and model.rotary_percent={percent} leave {turned} numbers of a head to turn, "
        f"which must be even: use model.kv_channels={head + 1}"
    )
