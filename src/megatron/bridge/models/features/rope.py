# SPDX-License-Identifier: Apache-2.0
"""Scaled rotary embeddings of every kind in transformers, with the same numbers as transformers.

Megatron-Core supports two kinds of scaling and fixes some of their parameters. Here the inverse frequencies and the
attention factor come from transformers' own functions, so a scaled model equals its reference.

The same holds for multi-latent attention, where every layer of Megatron-Core owns its embedding, and YaRN's parameters
follow different rules: with only ``mscale`` or ``mscale_all_dim`` they differ from transformers'.
"""

import copy
import math
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.models.common.embeddings import YarnRotaryEmbedding
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.transformer.utils import is_layer_window_attention
from torch import nn

from megatron.bridge.utils.errors import UserError, did_you_mean

NTK_ALPHA = "ntk_alpha"
"""Hunyuan's kind, which its configs call dynamic."""

MSCALES = ("short_mscale", "long_mscale")
"""Attention factors that Phi-3.5-MoE gives by name, for texts as short as the original ones and for longer ones."""


@dataclass(frozen=True)
class RopeKind:
    """Keys of ``rope_parameters`` that a ``rope_type`` needs, and those that it may have in addition."""

    needs: frozenset[str] = frozenset()
    may_have: frozenset[str] = frozenset()


KINDS = {
    "default": RopeKind(),
    "linear": RopeKind(needs=frozenset({"factor"})),
    "dynamic": RopeKind(needs=frozenset({"factor"})),
    "ntk_alpha": RopeKind(
        needs=frozenset({"alpha"}),
        may_have=frozenset({"factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}),
    ),
    "proportional": RopeKind(may_have=frozenset({"factor"})),
    "llama3": RopeKind(
        needs=frozenset(
            {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
        )
    ),
    "yarn": RopeKind(
        needs=frozenset({"factor", "original_max_position_embeddings"}),
        may_have=frozenset(
            {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}
        ),
    ),
    "longrope": RopeKind(
        needs=frozenset({"short_factor", "long_factor", "original_max_position_embeddings"}),
        may_have=frozenset({"attention_factor", "factor", "short_mscale", "long_mscale"}),
    ),
}
"""``rope_type`` -> its keys."""
_COMMON = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
_NO_NUMBERS = frozenset({"rope_type", "type", "truncate"})
_LISTS = frozenset({"short_factor", "long_factor"})
_MAY_BE_ZERO = frozenset({"mscale", "mscale_all_dim"})
"""0 means that there is no such factor."""


def check_parameters(parameters: dict[str, Any], name: str = "rope_parameters") -> None:
    """Refuse ``rope_parameters``, or the dict ``name``, with keys or values that are not supported."""
    kind = parameters.get("rope_type", "default")
    if kind not in KINDS:
        raise UserError(f"{name}.rope_type={kind!r} is not one of {', '.join(KINDS)}")
    if parameters.get("type", kind) != kind:
        raise UserError(
            f"{name} has rope_type={kind!r} and type={parameters['type']!r}: remove the wrong one"
        )
    keys = KINDS[kind]
    known = keys.needs | keys.may_have | _COMMON
    for key in sorted(set(parameters) - known):
        raise UserError(
            f"{name}.{key} is not a parameter of rope_type={kind!r}{did_you_mean(key, known)}"
        )
    for key in sorted(keys.needs):
        if parameters.get(key) is None:
            raise UserError(f"{name}.{key} is missing: rope_type={kind!r} needs it")
    _check_numbers(kind, parameters, name)


def _check_numbers(kind: str, parameters: dict[str, Any], name: str) -> None:
    """Refuse values with which the rule would divide by zero, or scale no position."""
    for key, value in parameters.items():
        if value is None or key in _NO_NUMBERS:
            continue
        values = value if key in _LISTS and isinstance(value, list | tuple) else [value]
        for number in values:
            is_number = isinstance(number, int | float) and not isinstance(number, bool)
            is_in_range = is_number and (number > 0 or (number == 0 and key in _MAY_BE_ZERO))
            if not is_in_range or not math.isfinite(number):
                bound = "of at least 0" if key in _MAY_BE_ZERO else "above 0"
                raise UserError(f"{name}.{key}={value!r} must be a number {bound}")
    short, long = (parameters.get(key) for key in MSCALES)
    if short != long:
        raise UserError(
            f"{name}.short_mscale={short} and long_mscale={long} must be equal: other are not supported"
        )
    low, high = (parameters.get(f"{end}_freq_factor") for end in ("low", "high"))
    if low is not None and high is not None and low > high:  # Llama 4 has equal ones
        raise UserError(
            f"{name}.low_freq_factor={low} must not be above high_freq_factor={high}: rope_type={kind!r} "
            f"blends what is between them"
        )


class ScaledRotaryEmbedding(RotaryEmbedding):
    """Megatron's rotary embedding, in the layout of ``plain``, with frequencies from one of transformers' rules."""

    def __init__(self, plain: RotaryEmbedding, config: Any, parameters: dict[str, Any]) -> None:
        super().__init__(**_embedding_arguments(plain, config, parameters))
        self._kind: str = parameters["rope_type"]
        self._reference = reference_config(config, parameters, config.kv_channels)
        device = self.inv_freq.device
        frequencies, factor = self._compute(None)
        self.attention_factor = parameters.get("short_mscale", factor)
        check_factors(parameters, len(frequencies))
        self._direction = -1.0 if config.rotary_reversed else 1.0
        if frequencies.shape != self.inv_freq.shape:
            raise UserError(
                f"rope_parameters rotates {2 * len(frequencies)} of {config.kv_channels} head dimensions but "
                f"rotary_percent={config.rotary_percent} means {2 * len(self.inv_freq)}: make them agree"
            )
        self.inv_freq = frequencies.to(device)

    def get_freqs_non_repeated(self, max_seq_len: int, offset: int = 0) -> torch.Tensor:
        """Angles [position, rotated dimension / 2] of ``max_seq_len`` positions from ``offset`` on."""
        positions = torch.arange(
            offset, offset + max_seq_len, device=self.inv_freq.device, dtype=torch.float32
        )
        return torch.outer(positions, self._direction * self._frequencies(max_seq_len + offset))

    def _frequencies(self, length: int) -> torch.Tensor:
        if changes_with_length(self._reference, length):
            return self._compute(length)[0].to(self.inv_freq.device)
        return self.inv_freq

    def _compute(self, length: int | None) -> tuple[torch.Tensor, float]:
        if self._kind == NTK_ALPHA:
            return _ntk_alpha(self._reference.rope_parameters, self._reference.head_dim), 1.0
        return frequencies_and_factor(self._reference, length)


class LayerwiseRotaryEmbedding(nn.Module):
    """Two rotary embeddings in one tensor, for layers with and without a window; each layer selects one."""

    def __init__(self, everywhere: RotaryEmbedding, local: RotaryEmbedding) -> None:
        super().__init__()
        self.everywhere = everywhere
        self.local = local

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Angles [2, s, 1, 1, most rotated dimensions]; the arguments are those of Megatron-Core's embedding."""
        both = self.everywhere(*args, **kwargs), self.local(*args, **kwargs)
        width = max(angles.size(-1) for angles in both)
        return torch.stack(
            [nn.functional.pad(angles, (0, width - angles.size(-1))) for angles in both]
        )

    def get_rotary_seq_len(self, *args: Any, **kwargs: Any) -> int:
        """How many positions the angles must cover."""
        return self.everywhere.get_rotary_seq_len(*args, **kwargs)

    def get_cos_sin(self, *_: Any) -> Any:
        """Refuse flash decoding, the only caller: its kernel takes one table for all layers."""
        raise UserError(
            "local_rope_parameters does not work with flash_decode=True: set model.flash_decode=False"
        )


def _ntk_alpha(parameters: dict[str, Any], width: int) -> torch.Tensor:
    """Inverse frequencies [width / 2] of Hunyuan's rule: one larger base, ``rope_theta * alpha^(d / (d - 2))``."""
    base = parameters["rope_theta"] * parameters["alpha"] ** (width / (width - 2))
    with torch.device("cpu"):  # numbers, even while the model is built on the meta device
        return 1.0 / (base ** (torch.arange(0, width, 2, dtype=torch.float) / width))


def frequencies_and_factor(reference: Any, length: int | None = None) -> tuple[torch.Tensor, float]:
    """Transformers' frequencies and attention factor for texts of this length, from ``reference_config``."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    with torch.device("cpu"):  # numbers, even while the model is built on the meta device
        return ROPE_INIT_FUNCTIONS[reference.rope_parameters["rope_type"]](
            reference, None, seq_len=length
        )


def changes_with_length(reference: Any, length: int) -> bool:
    """Whether transformers recomputes frequencies from the length of the current sequence."""
    kind = reference.rope_parameters["rope_type"]
    return kind == "longrope" or (kind == "dynamic" and length > reference.max_position_embeddings)


def check_factors(parameters: dict[str, Any], pairs: int) -> None:
    """Refuse lists without a number for each rotated pair of a head."""
    for name in ("short_factor", "long_factor"):
        factors = parameters.get(name)
        if factors is not None and len(factors) != pairs:
            raise UserError(
                f"rope_parameters.{name} has {len(factors)} numbers, the heads have {pairs} pairs"
            )


def apply_rope(model: Any, config: Any) -> None:
    """Give ``model`` (a ``GPTModel``) the scaled or layerwise rotary embedding that ``config`` declares."""
    parameters = config.rope_parameters or {}
    local = config.local_rope_parameters
    if config.rotary_reversed and _is_plain(parameters):
        model.rotary_pos_emb.inv_freq = -model.rotary_pos_emb.inv_freq
    if config.multi_latent_attention or (_is_plain(parameters) and not local):
        return  # latent attention has an embedding in each layer: ``apply_latent_rope``
    if config.position_embedding_type != "rope" or config.rope_scaling:
        name = "rope_parameters"
        setting = f"rope_parameters.rope_type={parameters.get('rope_type')!r}"
        if _is_plain(parameters):
            name = setting = "local_rope_parameters"
        raise UserError(
            f"{setting} has no effect with position_embedding_type={config.position_embedding_type!r} and "
            f"rope_scaling={config.rope_scaling}: use 'rope' and False, or remove {name}"
        )
    plain = model.rotary_pos_emb
    unwindowed = copy.copy(config)
    unwindowed.kv_channels = config.global_kv_channels or config.kv_channels
    everywhere = _rotary_embedding(
        plain, unwindowed, {**parameters, "rope_theta": config.rotary_base}
    )
    layers = [module for module in model.modules() if isinstance(module, TransformerLayer)]
    if not local:
        model.rotary_pos_emb = everywhere
        _set_attention_factor(layers, config, everywhere)
        return
    model.rotary_pos_emb = LayerwiseRotaryEmbedding(
        everywhere, _rotary_embedding(plain, config, local)
    )
    for layer in layers:
        is_local = is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer.layer_number
        )
        embedding = model.rotary_pos_emb.local if is_local else everywhere
        take = partial(_take_own_angles, int(is_local), 2 * len(embedding.inv_freq))
        layer.self_attention.register_forward_pre_hook(take, with_kwargs=True)
        _set_attention_factor([layer], config, embedding)


def _take_own_angles(
    index: int, width: int, _module: nn.Module, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Select a layer's own angles from those of ``LayerwiseRotaryEmbedding``."""
    return args, {**kwargs, "rotary_pos_emb": kwargs["rotary_pos_emb"][index, ..., :width]}


def _is_plain(parameters: dict[str, Any]) -> bool:
    return parameters.get("rope_type", "default") == "default"


def _rotary_embedding(
    plain: RotaryEmbedding, config: Any, parameters: dict[str, Any]
) -> RotaryEmbedding:
    check_parameters(parameters)
    if _is_plain(parameters):
        return RotaryEmbedding(**_embedding_arguments(plain, config, parameters))
    return ScaledRotaryEmbedding(plain, config, parameters)


def _embedding_arguments(
    plain: RotaryEmbedding, config: Any, parameters: dict[str, Any]
) -> dict[str, Any]:
    """The arguments to build a rotary embedding like ``plain`` with the base of ``parameters``."""
    return {
        "kv_channels": config.kv_channels,
        "rotary_percent": config.rotary_percent,
        "rotary_interleaved": plain.rotary_interleaved,
        "rotary_base": parameters["rope_theta"],
        "use_cpu_initialization": plain.inv_freq.device.type == "cpu",
        "cp_group": plain.cp_group,
    }


def _set_attention_factor(
    layers: list[Any], config: TransformerConfig, embedding: RotaryEmbedding
) -> None:
    factor = getattr(embedding, "attention_factor", 1.0)
    if factor == 1.0:
        return
    if config.apply_rope_fusion:
        # the fused kernel drops the factor for packed sequences without a word
        raise UserError(
            f"apply_rope_fusion=True cannot scale by the attention factor {factor:.4g} of rope_parameters: "
            "set model.apply_rope_fusion=False"
        )
    for attention in (layer.self_attention for layer in layers):
        attention._yarn_concentration_factor = 1.0 if config.qk_l2_norm else factor
        if (
            config.qk_l2_norm
        ):  # in transformers it comes after the rotation: all but its epsilon is free of the factor
            for norm in filter(None, (attention.q_layernorm, attention.k_layernorm)):
                norm.eps /= factor**2


def reference_config(config: Any, parameters: dict[str, Any], width: int) -> SimpleNamespace:
    """The config that transformers' functions read, for heads of ``width`` dimensions."""
    return SimpleNamespace(
        rope_parameters=parameters,
        head_dim=width,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        max_position_embeddings=config.max_position_embeddings or config.seq_length,
        standardize_rope_params=lambda: None,
    )


_LATENT = ("linear", "dynamic", "llama3", "yarn", "longrope")


class LatentRotaryEmbedding(YarnRotaryEmbedding):
    """Angles of the ``qk_pos_emb_head_dim`` rotated dimensions of a head, shared by all layers."""

    def __init__(self, config: Any, cp_group: Any) -> None:
        parameters = {**config.rope_parameters, "rope_theta": config.rotary_base}
        self._reference = reference_config(config, parameters, config.qk_pos_emb_head_dim)
        self._frequencies, self._attention_factor = frequencies_and_factor(self._reference)
        check_factors(parameters, len(self._frequencies))
        super().__init__(
            config.qk_pos_emb_head_dim,
            rotary_base=config.rotary_base,
            original_max_position_embeddings=config.original_max_position_embeddings,
            use_cpu_initialization=config.use_cpu_initialization,
            cp_group=cp_group,
        )

    def get_emb(self, max_seq_len: int, offset: int = 0) -> tuple[torch.Tensor, float]:
        """Angles [position, 1, 1, qk_pos_emb_head_dim] from ``offset`` on, and the factor of sines and cosines."""
        length = offset + max_seq_len
        device = torch.cuda.current_device()
        frequencies = self._frequencies = self._frequencies.to(device)
        if changes_with_length(self._reference, length):
            frequencies = frequencies_and_factor(self._reference, length)[0].to(device)
        angles = torch.outer(
            torch.arange(offset, length, device=frequencies.device, dtype=torch.float32),
            frequencies,
        )
        return torch.cat((angles, angles), dim=-1)[:, None, None, :], self._attention_factor


def derive_latent_rope(config: Any) -> None:
    """Set the Megatron-Core settings that ``config.rope_parameters`` implies, if it is set."""
    parameters = config.rope_parameters or {}
    kind = parameters.get("rope_type", "default")
    if kind == "default":
        return
    if kind not in _LATENT:
        raise UserError(
            f"rope_parameters.rope_type={kind!r} is not supported with multi-latent attention: {', '.join(_LATENT)} are"
        )
    config.rope_type = "yarn"  # the kind whose embedding has an attention factor
    # only sizes a first table of cosines: the least that can be shared out, as the layers' are replaced
    config.original_max_position_embeddings = 2 * config.context_parallel_size
    # the softmax is scaled by (0.1 mscale_all_dim ln(factor) + 1)^2, section 3.1.4 of arXiv:2405.04434
    config.rotary_scaling_factor = parameters.get("factor", 1.0)
    config.mscale_all_dim = parameters.get("mscale_all_dim") or 0.0


def apply_latent_rope(model: Any, config: Any) -> None:
    """Share one embedding, as ``config.rope_parameters`` describes, among all attention layers of ``model``."""
    layers = [module for module in model.modules() if isinstance(module, MultiLatentAttention)]
    if config.position_embedding_type == "none":  # the same features, not rotated
        for layer in layers:
            layer.rotary_pos_emb.inv_freq.zero_()
    if (config.rope_parameters or {}).get("rope_type", "default") == "default":
        return
    if layers:
        shared = LatentRotaryEmbedding(config, layers[0].pg_collection.cp)
        for layer in layers:
            layer.rotary_pos_emb = shared
            if getattr(layer.core_attention, "indexer", None):
                layer.core_attention.indexer.rotary_pos_emb = shared
