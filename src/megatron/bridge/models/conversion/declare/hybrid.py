# SPDX-License-Identifier: Apache-2.0
"""Hybrid architectures: fields and weights of kinds of layers, Mamba mixers, short convolutions, and some experts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import ceil, inf, isfinite
from typing import Any

from megatron.bridge.backends.specs.layer_specs import moe_pattern
from megatron.bridge.models.conversion.declare.blocks import Block, fused_norm
from megatron.bridge.models.conversion.declare.decoder_fields import ACTIVATION
from megatron.bridge.models.conversion.declare.fields import (
    ABSENT,
    Field,
    constant,
    kind_indices,
    layers_of_kind,
    read_by_others,
)
from megatron.bridge.models.conversion.declare.gated_delta_net import SILU
from megatron.bridge.models.conversion.param_mapping import (
    AutoMapping,
    ColumnParallelMapping,
    ConcatenatedGatedMLPMapping,
    MambaConv1dMapping,
    MambaInProjMapping,
    ReplicatedMapping,
    ShortConvMapping,
)
from megatron.bridge.models.features.mamba_beside_attention import MULTIPLIERS
from megatron.bridge.models.mamba_provider import ATTENTION, EXPERTS, FEED_FORWARD, KINDS, MAMBA
from megatron.bridge.utils.errors import UserError

_NAMES = {
    "linear_attention": MAMBA,
    "full_attention": ATTENTION,
    "mlp": FEED_FORWARD,
    "moe": EXPERTS,
}
_OLDER_NAMES = {"mamba": MAMBA, "attention": ATTENTION}


def _layer_symbols(config: Mapping[str, Any]) -> str:
    """Return a symbol for each layer, from the list of names or from the older string."""
    names = config.get("layers_block_type")
    symbols = config.get("hybrid_override_pattern")
    if names is None:
        if symbols is None:
            raise UserError("layers_block_type is missing: it lists the kind of each layer")
        names = list(symbols)
    known = {**_NAMES, **_OLDER_NAMES, **{symbol: symbol for symbol in KINDS}}
    for name in names:
        if name not in known:
            raise UserError(f"layers_block_type={name!r} is not supported: {', '.join(_NAMES)} are")
    pattern = "".join(known[name] for name in names)
    if symbols is not None and symbols != pattern:
        raise UserError(
            "hybrid_override_pattern and layers_block_type name different layers: remove one"
        )
    return pattern


def check_stored_pattern(stored: Mapping[str, Any]) -> None:
    """Refuse a ``config.json`` whose two lists of layers differ: transformers drops the older one unread."""
    names = stored.get("layers_block_type") or stored.get("layer_types")
    if names is not None and stored.get("hybrid_override_pattern") is not None:
        _layer_symbols({**stored, "layers_block_type": names})


def _names_back(_: Any, provider: Any) -> list[str]:
    names = {symbol: name for name, symbol in _NAMES.items()}
    return [names[symbol] for symbol in provider.layer_kinds]


def _number_of_layers(count: Any, config: Mapping[str, Any]) -> int:
    layers = len(_layer_symbols(config))
    if count not in (None, layers):
        raise UserError(
            f"num_hidden_layers={count} is not the {layers} layers that layers_block_type names"
        )
    return layers


def _width(_: Any, config: Mapping[str, Any]) -> int:
    widths = {
        key: config[key]
        for key in ("head_dim", "attention_head_dim")
        if config.get(key) is not None
    }
    if not widths:
        raise UserError("head_dim is missing: no other key has the width of a head")
    if len(set(widths.values())) > 1:
        raise UserError(
            f"{' and '.join(f'{key}={value}' for key, value in widths.items())} differ: remove one"
        )
    return next(iter(widths.values()))


def _mlp_bias(has_bias: bool, config: Mapping[str, Any]) -> tuple[bool, bool]:
    """Return (this bias, value of Megatron-Core's one switch for all linear layers)."""
    if has_bias and EXPERTS in _layer_symbols(config):
        raise UserError(
            "mlp_bias=True is not supported with layers of experts, which would have none"
        )
    return has_bias, has_bias


class _OfExperts(Field):
    """A field of models with layers of experts; in other models the key has no effect."""

    def read(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Set nothing if no layer has experts."""
        return super().read(config) if EXPERTS in _layer_symbols(config) else {}

    def write(self, provider: Any) -> Any:
        """Return the key's value, or ``ABSENT`` if no layer has experts."""
        return super().write(provider) if EXPERTS in provider.layer_kinds else ABSENT


_KINDS = ("full_attention", "linear_attention")


def _mixer_pattern(names: list[str] | None, config: Mapping[str, Any]) -> list[int]:
    """Return 1 for each layer with a Mamba-2 mixer."""
    older = {"attention": _KINDS[0], "mamba": _KINDS[1]}
    names = [older.get(name, name) for name in names or [_KINDS[1]] * config["num_hidden_layers"]]
    return kind_indices("layer_types", names, _KINDS, config)


def _head_width(width: int | str, config: Mapping[str, Any]) -> int:
    inner_width = config.get("mamba_d_ssm") or config.get("mamba_expand", 2) * config["hidden_size"]
    return inner_width // config.get("mamba_n_heads", 128) if isinstance(width, str) else width


def _mamba_expansion(provider: Any) -> int:
    return provider.mamba_num_heads * provider.mamba_head_dim // provider.hidden_size


def _mamba_heads(_: Any, config: Mapping[str, Any]) -> tuple[int, int]:
    return config["mamba_n_heads"], _head_width(config.get("mamba_d_head", "auto"), config)


def _mamba_groups(count: int, config: Mapping[str, Any]) -> int:
    if config["mamba_n_heads"] % count:
        raise UserError(
            f"mamba_n_groups={count} does not divide mamba_n_heads={config['mamba_n_heads']}"
        )
    return count


def _periodic_pattern(config: Mapping[str, Any], kind: str, period: int, offset: int) -> list[int]:
    """Return 1 for each layer of a kind that occurs once per period."""
    period = config.get(f"{kind}_layer_period", period)
    offset = config.get(f"{kind}_layer_offset", offset)
    return [int(layer % period == offset) for layer in range(config["num_hidden_layers"])]


def _period_and_offset(layers: Sequence[int]) -> tuple[int, int]:
    """Return (period, offset) of the layers with 1."""
    for period in range(1, len(layers) + 2):
        for offset in range(period):
            if [int(layer % period == offset) for layer in range(len(layers))] == list(layers):
                return period, offset
    raise UserError(
        f"mamba_layers and moe_layer_freq must be periodic for this architecture, unlike {list(layers)}"
    )


def _between_attention(_: Any, config: Mapping[str, Any]) -> list[int]:
    return [1 - attention for attention in _periodic_pattern(config, "attn", 8, 4)]


def _attention_back(index: int) -> Callable[[list[int], Any], int]:
    return lambda layers, _: _period_and_offset([1 - mixer for mixer in layers])[index]


def _expert_pattern(_: Any, config: Mapping[str, Any]) -> list[int] | int:
    return _periodic_pattern(config, "expert", 2, 1) if config["num_experts"] > 1 else 1


def _sparse_back(index: int, _: Any, provider: Any) -> int:
    return (_period_and_offset(moe_pattern(provider)) if provider.num_moe_experts else (2, 1))[
        index
    ]


_PATTERN = "hybrid_override_pattern"
LAYER_KINDS: tuple[Field, ...] = (
    Field(
        "layers_block_type", _PATTERN, None, lambda _, config: _layer_symbols(config), _names_back
    ),
    Field(
        _PATTERN,
        _PATTERN,
        None,
        lambda _, config: _layer_symbols(config),
        lambda _, provider: provider.layer_kinds,
    ),
    Field("num_hidden_layers", "num_layers", default=None, to=_number_of_layers),
)
"""Kind of each layer, as a list of names or as a string of symbols."""

MAMBA_SIZES: tuple[Field, ...] = (
    Field("mamba_num_heads", "mamba_num_heads"),
    Field("mamba_head_dim", "mamba_head_dim"),
    Field("ssm_state_size", "mamba_state_dim"),
    Field("n_groups", "mamba_num_groups"),
    Field("conv_kernel", "mamba_conv_kernel"),
    Field("chunk_size", "mamba_chunk_size"),
)


def _read_step_limit(limit: Sequence[float], _: Mapping[str, Any]) -> tuple[float, float | None]:
    """Return (smallest step, largest step), None for no largest step."""
    smallest, largest = limit
    if not isfinite(smallest):
        raise UserError(f"time_step_limit={list(limit)}: the smallest step must be a finite number")
    return smallest, None if largest == inf else largest


STEP_LIMIT = Field(
    "time_step_limit",
    ("mamba_smallest_step", "mamba_largest_step"),
    default=(0.0, inf),
    to=_read_step_limit,
    back=lambda limit, _: [limit[0], inf if limit[1] is None else limit[1]],
)
"""Limits of the step sizes of a trained model."""

ALL_MAMBA: tuple[Field, ...] = (
    Field(
        "num_hidden_layers",
        ("num_layers", "hybrid_override_pattern"),
        to=lambda count, _: (count, MAMBA * count),
    ),
    # Megatron-Core's config requires attention heads
    Field("num_heads", ("mamba_num_heads", "num_attention_heads")),
    Field("head_dim", "mamba_head_dim"),
    Field("state_size", "mamba_state_dim"),
    Field("n_groups", "mamba_num_groups"),
    Field("conv_kernel", "mamba_conv_kernel"),
    Field("chunk_size", "mamba_chunk_size"),
    Field("time_step_min", "mamba_first_step_min", default=0.001),
    Field("time_step_max", "mamba_first_step_max", default=0.1),
    Field("time_step_floor", "mamba_first_step_floor", default=1e-4),
    STEP_LIMIT,
    read_by_others("expand", 2, _mamba_expansion),
    constant("use_bias", False),
    constant("use_conv_bias", True),
)
"""Sizes and step limits of a model with only Mamba-2 mixers."""

MAMBA_STEPS: tuple[Field, ...] = (
    # transformers limits the steps of a trained model to the range of initial steps
    Field("time_step_min", ("mamba_first_step_min", "mamba_smallest_step")),
    Field("time_step_max", "mamba_first_step_max"),
    Field("time_step_floor", "mamba_first_step_floor"),
)

MAMBA_LAYERS = replace(
    layers_of_kind("layer_types", "mamba_layers", _KINDS), default=None, to=_mixer_pattern
)
"""Layers with a Mamba-2 mixer instead of attention."""

ONE_GROUP_MAMBA: tuple[Field, ...] = (
    SILU,
    Field("mamba_n_heads", "mamba_num_heads", default=128),
    Field("mamba_d_head", "mamba_head_dim", default="auto", to=_head_width),
    Field("mamba_d_state", "mamba_state_dim", default=256),
    read_by_others("mamba_expand", 2, _mamba_expansion),
    constant("mamba_n_groups", 1),
    Field("mamba_d_conv", "mamba_conv_kernel", default=4),
    STEP_LIMIT,
    constant("mamba_conv_bias", True),
    constant("mamba_proj_bias", False),
)
"""Sizes of Mamba-2 mixers that replace attention, with all heads in one group."""

_BESIDE = "mamba_beside_attention"


def _multiplier_field(key: str) -> Field:
    return Field(
        key,
        _BESIDE,
        MULTIPLIERS[key],
        _read_multipliers,
        lambda values, _: {**MULTIPLIERS, **values}[key],
    )


def _read_multipliers(_: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: config.get(key, default) for key, default in MULTIPLIERS.items()}


MAMBA_BESIDE_ATTENTION: tuple[Field, ...] = (
    *(field for field in ONE_GROUP_MAMBA if field.hf not in ("mamba_n_groups", "mamba_expand")),
    Field("mamba_n_groups", "mamba_num_groups", default=1, to=_mamba_groups),
    Field(
        "mamba_d_ssm",
        ("mamba_num_heads", "mamba_head_dim"),
        None,
        _mamba_heads,
        lambda sizes, _: sizes[0] * sizes[1],
    ),
    constant("mamba_rms_norm", False),
    *map(_multiplier_field, MULTIPLIERS),
)
"""Sizes of Mamba-2 mixers in addition to attention, and multipliers of all parts of a layer."""

SELECTIVE_MAMBA: tuple[Field, ...] = (
    SILU,
    Field("attn_layer_period", "mamba_layers", 8, _between_attention, _attention_back(0)),
    Field("attn_layer_offset", "mamba_layers", 4, _between_attention, _attention_back(1)),
    Field(
        "mamba_expand",
        ("mamba_num_heads", "mamba_head_dim"),
        default=2,
        to=lambda expand, config: (expand * config["hidden_size"], 1),
        back=lambda _, provider: _mamba_expansion(provider),
    ),
    Field("mamba_d_state", "mamba_state_dim", 16),
    Field(
        "mamba_dt_rank",
        "mamba_dt_rank",
        default="auto",
        to=lambda rank, config: ceil(config["hidden_size"] / 16) if isinstance(rank, str) else rank,
    ),
    Field("mamba_d_conv", "mamba_conv_kernel", default=4),
    constant("mamba_conv_bias", True),
    constant("mamba_proj_bias", False),
)
"""Mamba-1 mixers and their sizes; one layer per period has attention."""

PERIODIC_EXPERTS: tuple[Field, ...] = (
    Field("expert_layer_period", "moe_layer_freq", 2, _expert_pattern, partial(_sparse_back, 0)),
    Field("expert_layer_offset", "moe_layer_freq", 1, _expert_pattern, partial(_sparse_back, 1)),
)
"""Experts in one layer per period; no experts if there is only one."""

ONE_GROUP: dict[str, Any] = {"mamba_num_groups": 1}

ATTENTION_WIDTH: tuple[Field, ...] = (
    Field("head_dim", "kv_channels", default=None, to=_width),
    Field("attention_head_dim", "kv_channels", default=None, to=_width),
)
"""Width of a head, under its current and its older name."""

MLP_BIAS = Field("mlp_bias", ("mlp_bias", "add_bias_linear"), default=False, to=_mlp_bias)

MLP_ACTIVATION = replace(ACTIVATION, hf="mlp_hidden_act", default="relu2")


def of_experts(*fields: Field) -> tuple[Field, ...]:
    """Return ``fields`` that apply only if a layer has experts."""
    return tuple(
        _OfExperts(field.hf, field.megatron, field.default, field.to, field.back)
        for field in fields
    )


def mamba(
    layers: str,
    names: str = "mixer",
    norm: str | None = "norm",
    replaces_attention: bool = False,
    module: str = "mixer",
) -> Block:
    """A Mamba-2 mixer and the normalization before it.

    ``norm`` is None if ``attention`` maps the normalization of the same layer. With ``replaces_attention``, the mixer
    replaces attention in some layers, and ``attention`` maps the normalization if it is a separate module.
    ``module`` is Megatron's name of a mixer parallel to attention.
    """
    megatron_name = f"decoder.layers.*.{'self_attention' if replaces_attention else module}"
    hf_name = f"{layers}.{names}"
    norms = (
        fused_norm("decoder.layers.*.norm", f"{megatron_name}.in_proj", f"{layers}.{norm}")
        if norm
        else ()
    )
    if replaces_attention:
        norms = (
            ReplicatedMapping(
                f"{megatron_name}.in_proj.layer_norm_weight", f"{layers}.{norm}.weight"
            ),
        )
    return (
        *norms,
        MambaInProjMapping(f"{megatron_name}.in_proj.weight", f"{hf_name}.in_proj.weight"),
        MambaConv1dMapping(f"{megatron_name}.conv1d_weight", f"{hf_name}.conv1d.weight"),
        MambaConv1dMapping(f"{megatron_name}.conv1d_bias", f"{hf_name}.conv1d.bias"),
        *(
            ColumnParallelMapping(f"{megatron_name}.{name}", f"{hf_name}.{name}")
            for name in ("A_log", "D", "dt_bias", "norm.weight")
        ),
        AutoMapping(f"{megatron_name}.out_proj.weight", f"{hf_name}.out_proj.weight"),
    )


def selective_mamba(
    layers: str = "model.layers.*", names: str = "mamba", norm: str = "input_layernorm"
) -> Block:
    """A Mamba-1 mixer; ``attention`` maps the normalization before it if that is a separate module."""
    megatron_name = "decoder.layers.*.self_attention"
    hf_name = f"{layers}.{names}"
    same = ("A_log", "D", "out_proj.weight")
    pairs = {
        "conv1d_weight": "conv1d.weight",
        "conv1d_bias": "conv1d.bias",
        "x_proj": "x_proj.weight",
    }
    pairs |= {
        "dt_proj": "dt_proj.weight",
        "dt_bias": "dt_proj.bias",
        **dict(zip(same, same, strict=True)),
    }
    return (
        ConcatenatedGatedMLPMapping(f"{megatron_name}.in_proj.weight", f"{hf_name}.in_proj.weight"),
        ReplicatedMapping(f"{megatron_name}.in_proj.layer_norm_weight", f"{layers}.{norm}.weight"),
        *(
            AutoMapping(f"{megatron_name}.{megatron_part}", f"{hf_name}.{hf}")
            for megatron_part, hf in pairs.items()
        ),
        *(
            ReplicatedMapping(
                f"{megatron_name}.norms.{n}.weight", f"{hf_name}.{n}_layernorm.weight"
            )
            for n in ("dt", "b", "c")
        ),
    )


_MULTIPLE = 256


def _adjusted_ffn_width(_: Any, config: Mapping[str, Any]) -> int:
    """Return the width of feed-forward layers that transformers derives from four keys."""
    width: int = config["intermediate_size"]
    if not config.get("block_auto_adjust_ff_dim", True):
        return width
    multiple: int = config.get("block_multiple_of", _MULTIPLE)
    factor: float | None = config.get("block_ffn_dim_multiplier")
    width = int(2 * width / 3)
    return width if factor is None else -(-int(factor * width) // multiple) * multiple


def _is_adjusted(width: int, _: Any) -> bool:
    return width % _MULTIPLE == 0


def _adjusted_back(width: int, _: Any) -> int:
    return width * 3 // 2 if _is_adjusted(width, None) else width


SHORT_CONV: tuple[Field, ...] = (
    Field("conv_L_cache", "linear_conv_kernel_dim"),
    layers_of_kind("layer_types", "short_conv_layers", ("full_attention", "conv")),
)
"""Layers with a convolution instead of attention, and the convolution's number of tokens."""

ADJUSTED_WIDTH: tuple[Field, ...] = (
    Field("intermediate_size", "ffn_hidden_size", to=_adjusted_ffn_width, back=_adjusted_back),
    Field(
        "block_auto_adjust_ff_dim",
        "ffn_hidden_size",
        default=True,
        to=_adjusted_ffn_width,
        back=_is_adjusted,
    ),
    Field(
        "block_ffn_dim_multiplier",
        "ffn_hidden_size",
        default=1.0,
        to=_adjusted_ffn_width,
        back=lambda _, __: 1.0,
    ),
    Field(
        "block_multiple_of",
        "ffn_hidden_size",
        default=_MULTIPLE,
        to=_adjusted_ffn_width,
        back=lambda _, __: _MULTIPLE,
    ),
)
"""Width of feed-forward layers: 2/3 of the config's value, rounded up to a multiple, unless adjustment is off."""


def short_conv(layers: str = "model.layers.*", norm: str = "operator_norm") -> Block:
    """A gated short convolution; ``attention`` maps the normalization before it if that is a module."""
    megatron_name = "decoder.layers.*.self_attention"
    hf_name = f"{layers}.conv"
    return (
        ShortConvMapping(f"{megatron_name}.in_proj.weight", f"{hf_name}.in_proj.weight"),
        ReplicatedMapping(f"{megatron_name}.in_proj.layer_norm_weight", f"{layers}.{norm}.weight"),
        AutoMapping(f"{megatron_name}.conv1d.weight", f"{hf_name}.conv.weight"),
        AutoMapping(f"{megatron_name}.out_proj.weight", f"{hf_name}.out_proj.weight"),
    )
