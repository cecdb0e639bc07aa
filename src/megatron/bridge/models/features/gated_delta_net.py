# SPDX-License-Identifier: Apache-2.0
"""What a model with other layers than attention must fulfil, said before it is built."""

from typing import Any

import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.bridge.backends.specs.layer_specs import linear_pattern
from megatron.bridge.utils.errors import UserError

LAYERS = ("short_conv_layers", "mamba_layers")
"""Fields that list layers with another mixer than attention."""

# features of a layer that were made for attention alone -> the value with which they change nothing
_OF_ATTENTION: dict[str, Any] = {
    "norm_placement": "pre",
    "qk_norm_across_heads": False,
    "qk_norm_by_head": False,
    "qk_norm_after_rope": False,
    "parallel_residual": None,
    "attn_logit_softcapping": None,
    "multi_latent_attention": False,
}


def check(config: TransformerConfig) -> None:
    """Refuse layers that Megatron-Core would build differently, or not at all.

    Raises:
        UserError: sizes that do not divide, or features that gated delta nets do not have.
    """
    kind = config.experimental_attention_variant
    for name in LAYERS:
        if getattr(config, name, None) is not None:
            _check_layers(config, name)
    if kind is None:
        if config.linear_attention_freq is not None:
            raise UserError(
                "linear_attention_freq has no effect without experimental_attention_variant='gated_delta_net': "
                "set both, or neither"
            )
        return
    if kind != "gated_delta_net":
        raise UserError(f"experimental_attention_variant={kind!r} is not supported: 'gated_delta_net' is")
    if config.linear_attention_freq is None:
        raise UserError("linear_attention_freq is not set: say which layers have a gated delta net")
    pattern = linear_pattern(config)
    if config.mtp_num_layers and pattern[-1]:
        raise UserError(
            f"mtp_num_layers={config.mtp_num_layers} needs attention in the last layer, which it repeats: "
            "linear_attention_freq has a gated delta net there"
        )
    _check_heads(config)
    if config.activation_func is not F.silu:
        raise UserError("activation_func must be SiLU: gated delta nets have no other")
    for name, harmless in _OF_ATTENTION.items():
        if getattr(config, name, harmless) != harmless:
            raise UserError(
                f"{name}={getattr(config, name)!r} is not supported in a model with gated delta nets: set "
                f"model.{name}={harmless!r}"
            )


def _check_layers(config: TransformerConfig, layers: str) -> None:
    if config.context_parallel_size > 1:
        raise UserError(
            f"context_parallel_size={config.context_parallel_size} is not supported with {layers}: a "
            "convolution sees tokens that another rank has"
        )
    sizes = ("mamba_num_heads", "mamba_state_dim") if layers == "mamba_layers" else ("hidden_size",)
    for name in sizes:
        if (getattr(config, name) or 0) % config.tensor_model_parallel_size:
            raise UserError(
                f"tensor_model_parallel_size={config.tensor_model_parallel_size} does not divide "
                f"{name}={getattr(config, name)}, which {layers} needs"
            )
    one_mixer = {name: None for name in LAYERS if name != layers}
    others: dict[str, Any] = {**_OF_ATTENTION, **one_mixer, "experimental_attention_variant": None}
    for name, harmless in {**others, "mtp_num_layers": None}.items():
        if getattr(config, name, harmless) != harmless:
            raise UserError(f"{name}={getattr(config, name)!r} is not supported with {layers}")


def _check_heads(config: TransformerConfig) -> None:
    keys, values = config.linear_num_key_heads or 0, config.linear_num_value_heads or 0
    if keys < 1 or values % keys:
        raise UserError(f"linear_num_key_heads={keys} does not divide linear_num_value_heads={values}")
    ranks = config.tensor_model_parallel_size * config.context_parallel_size
    if keys % ranks:
        raise UserError(
            f"linear_num_key_heads={keys} cannot be shared among tensor_model_parallel_size="
            f"{config.tensor_model_parallel_size} x context_parallel_size={config.context_parallel_size} ranks: "
            "lower one of them"
        )
