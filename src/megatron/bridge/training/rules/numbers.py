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
