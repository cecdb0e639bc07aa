# SPDX-License-Identifier: Apache-2.0
"""What a model with other layers than attention must fulfil, said before it is built."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.bridge.backends.specs.layer_specs import MIXERS, linear_pattern
from megatron.bridge.utils.errors import UserError

LAYERS = tuple(MIXERS)
"""Fields that list layers with another mixer than attention."""

# such a field -> the sizes that tensor-parallel ranks split
_SPLIT = {
    "kda_layers": ("linear_num_key_heads",),
    "short_conv_layers": ("hidden_size",),
    "mamba_layers": ("mamba_num_heads", "mamba_state_dim"),
}

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
    """Refuse layers that Megatron-Core would build differently or not at all."""
    for name in LAYERS:
        if any(getattr(config, name, None) or ()):
            _check_layers(config, name)
    _check_delta_nets(config)


def _check_delta_nets(config: TransformerConfig) -> None:
    kind = config.experimental_attention_variant
    if kind == "dsa" and not config.multi_latent_attention:
        raise UserError(
            "experimental_attention_variant='dsa' is not supported without multi_latent_attention"
        )
    if kind in (None, "dsa"):
        if config.linear_attention_freq is not None:
            raise UserError(
                "linear_attention_freq has no effect without experimental_attention_variant='gated_delta_net': "
                "set both, or neither"
            )
        return
    if kind != "gated_delta_net":
        raise UserError(
            f"experimental_attention_variant={kind!r} is not supported: 'gated_delta_net' and 'dsa' are"
        )
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
    exclude(config, _OF_ATTENTION, "in a model with gated delta nets", say_value=True)


def _check_layers(config: TransformerConfig, layers: str) -> None:
    if config.context_parallel_size > 1:
        raise UserError(
            f"context_parallel_size={config.context_parallel_size} is not supported with {layers}: a "
            "convolution sees tokens that another rank has"
        )
    is_mamba_1 = bool(getattr(config, "mamba_dt_rank", None))
    check_split(
        config,
        [name for name in _SPLIT[layers] if not (is_mamba_1 and name == "mamba_state_dim")],
        layers,
    )
    required: dict[str, Any] = {
        **_OF_ATTENTION,
        "experimental_attention_variant": None,
        "mtp_num_layers": None,
    }
    if layers == "mamba_layers":
        required["mamba_num_groups"] = 1
    else:
        required["mamba_layers"] = None
    if layers == "kda_layers":
        required["multi_latent_attention"] = True
        required["linear_value_head_dim"] = config.linear_key_head_dim
        required["linear_num_value_heads"] = config.linear_num_key_heads
    exclude(config, required, f"with {layers}")


def check_split(config: Any, names: Iterable[str], needed_by: str) -> None:
    """Refuse sizes ``names`` that tensor-parallel ranks cannot split."""
    ranks = config.tensor_model_parallel_size
    for name in names:
        size = getattr(config, name)
        if not size or size % ranks:
            raise UserError(
                f"tensor_model_parallel_size={ranks} does not divide {name}={size}, which {needed_by} needs"
            )


def exclude(
    config: Any, harmless: Mapping[str, Any], context: str, say_value: bool = False
) -> None:
    """Refuse settings that are not supported ``context``, unless they are ``harmless``, a value that may be named."""
    for name, value in harmless.items():
        if (given := getattr(config, name, value)) != value:
            way_out = f": set model.{name}={value!r}" if say_value else ""
            raise UserError(f"{name}={given!r} is not supported {context}{way_out}")


def _check_heads(config: TransformerConfig) -> None:
    keys, values = config.linear_num_key_heads or 0, config.linear_num_value_heads or 0
    if keys < 1 or values % keys:
        raise UserError(
            f"linear_num_key_heads={keys} does not divide linear_num_value_heads={values}"
        )
    ranks = config.tensor_model_parallel_size * config.context_parallel_size
    if keys % ranks:
        raise UserError(
            f"linear_num_key_heads={keys} cannot be shared among tensor_model_parallel_size="
            f"{config.tensor_model_parallel_size} x context_parallel_size={config.context_parallel_size} ranks: "
            "lower one of them"
        )
