# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingTypeStubs=false
"""Fields that decoder-only architectures share: sizes, activations, rotary embeddings, precision, biases."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core.activations import quick_gelu, squared_relu
from megatron.core.transformer import utils as transformer_utils

from megatron.bridge.models.conversion.declare.fields import Field, kind_indices, named
from megatron.bridge.models.features.activations import gelu_fast, gelu_new, gelu_tanh
from megatron.bridge.models.features.rope import NTK_ALPHA, check_parameters
from megatron.bridge.utils.errors import UserError

_ACTIVATIONS: dict[str, Callable[..., torch.Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": gelu_tanh,
    "gelu_new": gelu_new,
    "gelu_fast": gelu_fast,
    "relu": F.relu,
    "relu2": squared_relu,
    "relu6": F.relu6,
    "quick_gelu": quick_gelu,
    "mish": F.mish,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}


def _read_activation(name: Any, config: Mapping[str, Any]) -> Callable[..., torch.Tensor]:
    if name not in _ACTIVATIONS:
        keys = (
            "hidden_act",
            "hidden_activation",
            "mlp_hidden_act",
            "activation_function",
            "activation",
        )
        key = next((key for key in keys if config.get(key) == name), keys[0])
        raise UserError(f"{key}={name!r} is not supported: {', '.join(_ACTIVATIONS)} are")
    return _ACTIVATIONS[name]


def _activation_name(function: Any, _: Any) -> str:
    return next(name for name, known in _ACTIVATIONS.items() if known is function)


def _read_rope(
    parameters: Any, config: Mapping[str, Any]
) -> tuple[dict[str, Any] | None, float, float]:
    """Return ``_partial_rope`` for architectures that read a rotated share and rotate complete heads."""
    values = _partial_rope(parameters, config)
    if values[2] != 1.0:
        raise UserError(
            f"partial_rotary_factor={values[2]} must be 1: this architecture rotates complete heads"
        )
    return values


def _partial_rope(
    parameters: Any, config: Mapping[str, Any]
) -> tuple[dict[str, Any] | None, float, float]:
    """Return (scaling without its base, base, rotated share of a head); scaling is None if there is none."""
    parameters = dict(parameters or {})
    check_parameters(parameters)
    if parameters.get("rope_type") == NTK_ALPHA:  # defined by this package only
        raise UserError(
            f"rope_parameters.rope_type={NTK_ALPHA!r} is not a kind that transformers computes"
        )
    parameters.pop("type", None)
    base = parameters.pop("rope_theta", None)
    if base is None:
        base = config.get("rope_theta") or 10000.0
    scaling = {key: value for key, value in parameters.items() if value is not None}
    share = scaling.get("partial_rotary_factor", config.get("partial_rotary_factor") or 1.0)
    if share == 1.0:  # the same as no entry
        scaling.pop("partial_rotary_factor", None)
    plain = scaling.get("rope_type", "default") == "default"
    return None if plain else scaling, base, share


def _rope_back(values: tuple[dict[str, Any] | None, float, float], _: Any) -> dict[str, Any]:
    scaling, base, share = values
    partial = {} if share == 1.0 else {"partial_rotary_factor": share}
    return {"rope_type": "default", **partial, **(scaling or {}), "rope_theta": base}


def _partial_rope_back(
    values: tuple[dict[str, Any] | None, float, float], provider: Any
) -> dict[str, Any]:
    # written even for complete heads: these architectures have another default
    return {**_rope_back(values, provider), "partial_rotary_factor": values[2]}


def _rope_of_text(
    parameters: Any, config: Mapping[str, Any]
) -> tuple[dict[str, Any] | None, float, float]:
    """Remove keys for multi-axis positions: text tokens have the same position on all three axes."""
    text_parameters = dict(parameters or {})
    for key in ("mrope_section", "mrope_interleaved"):
        text_parameters.pop(key, None)
    return _partial_rope(text_parameters, config)


def _scaled_query_rope(parameters: Any, config: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the scaling, base and rotated share, and beta: queries are scaled beyond the original length."""
    rope_parameters = dict(parameters or {})
    for key in ("llama_4_scaling_beta", "original_max_position_embeddings"):
        if rope_parameters.get(key) is None:  # transformers fails without them
            raise UserError(
                f"rope_parameters.{key} is missing: this architecture scales its queries by it"
            )
    beta = rope_parameters.pop("llama_4_scaling_beta")
    rope_parameters.pop("max_position_embeddings", None)  # an unused copy of the config's value
    return *_read_rope(rope_parameters, config), beta


def _read_layer_ropes(parameters: Any, config: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return (scaling, base, rotated share) of layers without a window, and the parameters of layers with one."""
    if sorted(parameters or ()) != sorted(_LAYER_TYPES):
        raise UserError(
            f"rope_parameters={parameters} must have the keys {' and '.join(_LAYER_TYPES)}"
        )
    everywhere, local = (_read_rope(parameters[kind], config) for kind in _LAYER_TYPES)
    return *everywhere, _rope_back(local, None)


def _ntk_alpha(parameters: Any, config: Mapping[str, Any]) -> tuple[Any, ...]:
    """Extend ``_read_rope`` by the kind ``dynamic`` with an ``alpha``, which is static despite its name."""
    rope_parameters = dict(parameters or {})
    if rope_parameters.get("rope_type") != "dynamic" or not rope_parameters.get("alpha"):
        return _read_rope(rope_parameters, config)
    rope_parameters.pop("type", None)
    base = rope_parameters.pop("rope_theta", 10000.0)
    check_parameters({**rope_parameters, "rope_type": NTK_ALPHA})
    return {**rope_parameters, "rope_type": NTK_ALPHA}, base, 1.0


def _ntk_alpha_back(values: Any, _: Any) -> dict[str, Any]:
    back = _rope_back(values, None)
    return {**back, "rope_type": "dynamic"} if back["rope_type"] == NTK_ALPHA else back


def _from_scale(scale: float, _: Any) -> float | int:
    """Return the original integer, if an integer gives the same scale."""
    scalar = scale**-2
    return round(scalar) if round(scalar) ** -0.5 == scale else scalar


def _read_precision(dtype: Any, _: Mapping[str, Any]) -> tuple[torch.dtype, bool, bool]:
    """Return (dtype of the parameters, bf16, fp16)."""
    from megatron.bridge.models.hf_pretrained.causal_lm import to_dtype

    torch_dtype = to_dtype(dtype) or torch.float32
    if torch_dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise UserError(f"dtype={dtype} is not supported: float32, bfloat16 and float16 are")
    return torch_dtype, torch_dtype is torch.bfloat16, torch_dtype is torch.float16


def _precision_back(values: tuple[torch.dtype, bool, bool], _: Any) -> str:
    dtype, bf16, fp16 = values
    return "bfloat16" if bf16 else "float16" if fp16 else str(dtype).removeprefix("torch.")


def _or_heads(groups: Any, config: Mapping[str, Any]) -> int:
    heads = config["num_attention_heads"]
    if groups is not None and heads % groups:
        raise UserError(f"num_key_value_heads={groups} does not divide num_attention_heads={heads}")
    return heads if groups is None else groups


def _head_width(width: Any, config: Mapping[str, Any]) -> int:
    return config["hidden_size"] // config["num_attention_heads"] if width is None else width


def _with_any_bias(has_bias: bool, config: Mapping[str, Any]) -> tuple[bool, bool]:
    """Return (this bias, whether the model has any): Megatron-Core has one switch, the provider two more."""
    return has_bias, bool(config.get("attention_bias") or config.get("mlp_bias"))


def _part_biases(_: Any, config: Mapping[str, Any]) -> tuple[bool | None, ...]:
    """Return values of ``_PART_BIASES``; ``add_bias_linear`` only if needed: not all backends remove a bias."""
    qkv, out, mlp = (
        bool(config.get(key)) for key in ("attention_bias", "attention_out_bias", "mlp_bias")
    )
    return (False, True, qkv, out, mlp) if out or mlp else (qkv, False, None, None, None)


def _has_bias(part: int, values: tuple[bool | None, ...], _: Any) -> bool:
    """Return whether linear layers have biases, and switch ``part`` of ``_PART_BIASES`` is not off."""
    return bool(values[1]) and values[part] is not False


def _invert_scale(scale: float | None, _: Any) -> float:
    return 1.0 / scale if scale else 1.0


def _inverse_back(divisor: float, _: Any) -> float:
    return float(
        f"{1.0 / divisor:.15g}"
    )  # the original number, without a rounding error in the last bit


def _read_window(width: Any, _: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return (number of earlier keys, of later keys) that a query sees; Hugging Face also counts its own key."""
    if width is None:
        return None
    if width < 1:
        raise UserError(f"sliding_window={width} must be at least 1, or null for no window")
    return width - 1, 0


def _window_back(window: tuple[int, int] | None, _: Any) -> int | None:
    return None if window is None else window[0] + 1


def _window_pattern(kinds: list[str], config: Mapping[str, Any]) -> list[int]:
    """Return 1 for each layer with a window, 0 for each without."""
    windowed = kind_indices("layer_types", kinds, _LAYER_TYPES, config)
    if any(windowed) and not config.get("sliding_window"):
        raise UserError(f"sliding_window is missing: layer_types has {_LAYER_TYPES[1]}")
    return windowed


def _switched_window(_: Any, config: Mapping[str, Any]) -> tuple[int, int] | None:
    return _read_window(
        config.get("sliding_window") if config.get("use_sliding_window", True) else None, config
    )


def _switched_layers(kinds: list[str], config: Mapping[str, Any]) -> list[int]:
    if _LAYER_TYPES[1] in kinds and not config.get("use_sliding_window", True):
        raise UserError(
            f"use_sliding_window=False and layer_types has {_LAYER_TYPES[1]}: make them agree"
        )
    return _window_pattern(kinds, config)


def _windowed_rope(kinds: list[str], config: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    windowed = _window_pattern(kinds, config)
    return windowed, [int(not window) for window in windowed]


def _windowed_rope_if_any(
    kinds: list[str], config: Mapping[str, Any]
) -> tuple[list[int], list[int] | None]:
    windowed, without = _windowed_rope(kinds, config)
    return windowed, without if config.get("sliding_window") else None


def _windowed_rope_back(values: tuple[Any, Any], provider: Any) -> list[str]:
    return _windowed_back(values[0], provider)


def _windowed_back(pattern: Any, provider: Any) -> list[str]:
    windowed = cast(Any, transformer_utils).is_layer_window_attention
    layers = range(1, provider.num_layers + 1)
    return [_LAYER_TYPES[windowed(provider.window_size, pattern, layer)] for layer in layers]


def _without_rope(rotated: list[int], config: Mapping[str, Any]) -> list[int]:
    """Return 1 for each layer without a rotary embedding; Hugging Face has 1 for each layer with one."""
    layers = config["num_hidden_layers"]
    if len(rotated) < layers:
        raise UserError(f"no_rope_layers has {len(rotated)} layers, num_hidden_layers={layers}")
    return [int(not rotates) for rotates in rotated[:layers]]


def _rotation_pattern(without: list[int] | None, provider: Any) -> list[int]:
    return [int(not skips) for skips in without or [0] * provider.num_layers]


_LAYER_TYPES = ("full_attention", "sliding_attention")


DTYPE = Field(
    "dtype",
    ("params_dtype", "bf16", "fp16"),
    default=None,
    to=_read_precision,
    back=_precision_back,
)

ROPE = Field(
    "rope_parameters",
    ("rope_parameters", "rotary_base", "rotary_percent"),
    default=None,
    to=_read_rope,
    back=_rope_back,
)

PARTIAL_ROPE = replace(ROPE, to=_partial_rope, back=_partial_rope_back)
"""Rotary embedding of a share of each head, ``partial_rotary_factor``."""

PARTIAL_ROPE_OF_TEXT = replace(PARTIAL_ROPE, to=_rope_of_text)
"""Rotary embedding of a share of each head, in a model with images and positions on three axes."""

LAYER_ROPE = Field(
    "rope_parameters",
    ("rope_parameters", "rotary_base", "rotary_percent", "local_rope_parameters"),
    to=_read_layer_ropes,
    back=lambda values, _: dict(
        zip(_LAYER_TYPES, (_rope_back(values[:3], None), values[3]), strict=True)
    ),
)
"""Separate rotary embeddings for layers with and without a window."""

NTK_ALPHA_ROPE = replace(ROPE, to=_ntk_alpha, back=_ntk_alpha_back)
"""Rotary embedding with Hunyuan's kind ``dynamic``, whose ``alpha`` increases the base."""

SCALED_QUERY_ROPE = Field(
    "rope_parameters",
    ("rope_parameters", "rotary_base", "rotary_percent", "query_scaling_beta"),
    to=_scaled_query_rope,
    back=lambda values, _: (
        _rope_back(values[:3], None) | {"llama_4_scaling_beta": values[3] or 0.0}
    ),
)
"""Rotary embedding, and scaling of queries with their position."""

ACTIVATION = Field(
    "hidden_act", "activation_func", default="silu", to=_read_activation, back=_activation_name
)

DENSE: tuple[Field, ...] = (
    DTYPE,
    Field("vocab_size", "vocab_size"),
    Field("hidden_size", "hidden_size"),
    Field("intermediate_size", "ffn_hidden_size"),
    Field("num_hidden_layers", "num_layers"),
    Field("num_attention_heads", "num_attention_heads"),
    Field("num_key_value_heads", "num_query_groups", default=None, to=_or_heads),
    Field("head_dim", "kv_channels", default=None, to=_head_width),
    ACTIVATION,
    Field("max_position_embeddings", ("max_position_embeddings", "seq_length")),
    Field("initializer_range", "init_method_std", default=0.02),
    Field("rms_norm_eps", "layernorm_epsilon"),
    Field("tie_word_embeddings", "share_embeddings_and_output_weights", default=False),
    Field("attention_dropout", "attention_dropout", default=0.0),
    ROPE,
)

ATTENTION_BIAS = Field(
    "attention_bias", ("attention_bias", "add_bias_linear"), default=False, to=_with_any_bias
)
"""Biases of all four projections of attention; set the feed-forward layer's bias in ``fixed``."""

BIASES: tuple[Field, ...] = (
    ATTENTION_BIAS,
    Field("mlp_bias", ("mlp_bias", "add_bias_linear"), default=False, to=_with_any_bias),
)
"""Biases of attention (output projection included) and of the feed-forward layer, with separate switches."""

_PART_BIASES = (
    "add_qkv_bias",
    "add_bias_linear",
    "attention_bias",
    "attention_output_bias",
    "mlp_bias",
)

PART_BIASES: tuple[Field, ...] = (
    Field(
        "attention_bias",
        _PART_BIASES,
        False,
        _part_biases,
        lambda it, _: bool(it[0]) or _has_bias(2, it, _),
    ),
    Field(
        "attention_out_bias",
        _PART_BIASES,
        default=False,
        to=_part_biases,
        back=partial(_has_bias, 3),
    ),
    Field("mlp_bias", _PART_BIASES, default=False, to=_part_biases, back=partial(_has_bias, 4)),
)
"""Biases of queries, keys and values, of the output projection, and of the feed-forward layer, separately."""

ALL_BIASES = Field("use_bias", "add_bias_linear", default=False)
"""One switch for the biases of attention and feed-forward layer."""

LOGIT_SCALE = Field(
    "logit_scale", "logits_scaling", default=1.0, to=_invert_scale, back=_inverse_back
)
"""Factor of the logits; the provider has its inverse."""

ONLY_QKV_BIAS: dict[str, Any] = {"add_qkv_bias": True, "add_bias_linear": False}
"""Only queries, keys and values have a bias, in all models."""

QUERY_SCALE = Field(
    "query_pre_attn_scalar", "softmax_scale", to=lambda scalar, _: scalar**-0.5, back=_from_scale
)
"""Number whose root divides the attention scores, instead of the root of the head's width."""

WINDOW = Field("sliding_window", "window_size", default=None, to=_read_window, back=_window_back)
"""Width of the window of all layers, including the query's own key; null means all keys."""

LAYER_TYPES = Field("layer_types", "window_attn_skip_freq", to=_window_pattern, back=_windowed_back)
"""Layers with the window."""

WINDOWED_ROPE = Field(
    "layer_types",
    ("window_attn_skip_freq", "no_rope_freq"),
    to=_windowed_rope,
    back=_windowed_rope_back,
)
"""Layers with the window, which alone have a rotary embedding."""

WINDOWED_ROPE_IF_ANY = replace(WINDOWED_ROPE, to=_windowed_rope_if_any)
"""Layers with the window, which alone have a rotary embedding, unless ``sliding_window`` is null."""

NO_ROPE_LAYERS = Field("no_rope_layers", "no_rope_freq", to=_without_rope, back=_rotation_pattern)
"""Layers with a rotary embedding, as 1; null means all layers."""

WINDOWS: tuple[Field, ...] = (WINDOW, LAYER_TYPES)
"""Window in the layers that ``layer_types`` names."""

SWITCHED_WINDOWS: tuple[Field, ...] = (
    Field(
        "use_sliding_window",
        "window_size",
        False,
        _switched_window,
        lambda window, _: window is not None,
    ),
    Field("sliding_window", "window_size", default=None, to=_switched_window, back=_window_back),
    Field("layer_types", "window_attn_skip_freq", to=_switched_layers, back=_windowed_back),
)
"""Window in the layers that ``layer_types`` names, with a switch."""


def parallel_residual(kind: str, default: bool) -> Field:
    """Return a field for the switch ``use_parallel_residual``: attention and MLP read the same input."""
    return named("use_parallel_residual", "parallel_residual", {True: kind, False: None}, default)


NORM_EPS = Field("layer_norm_eps", "layernorm_epsilon", default=1e-5)
"""Epsilon of architectures with LayerNorms."""

LLAMA_LIKE: dict[str, Any] = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "position_embedding_type": "rope",
    "hidden_dropout": 0.0,
    # only as many rows of padding as the tensor-parallel ranks need, because Hugging Face has no padding
    "should_pad_vocab": True,
    "make_vocab_size_divisible_by": 1,
}
"""Values that architectures like Llama imply without a key."""

LAYER_NORM_LIKE: dict[str, Any] = {
    **LLAMA_LIKE,
    "normalization": "LayerNorm",
    "layernorm_bias": True,
}
"""Values that architectures like Llama imply without a key, but with LayerNorms."""
