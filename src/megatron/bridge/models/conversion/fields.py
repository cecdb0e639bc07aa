# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingTypeStubs=false
"""Keys of a Hugging Face config and the provider's attributes they stand for, readable in both directions.

Every key of a config is claimed by a field, listed as irrelevant, or refused by name: a key that nobody reads is a
model that computes something else.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.activations import squared_relu

from megatron.bridge.models.rope import check_parameters
from megatron.bridge.utils.errors import UserError, did_you_mean

REQUIRED: Any = object()
"""Marks a field whose key must be there."""


@dataclass(frozen=True)
class Field:
    """One key and the attributes that it sets.

    Attributes:
        hf: key of the Hugging Face config.
        megatron: attribute of the provider, or several.
        default: value of an absent key.
        to: (value, whole Hugging Face config) -> value, or values, of ``megatron``; None takes it as it is.
        back: (value or values, provider) -> value of ``hf``; None takes the first as it is.
    """

    hf: str
    megatron: str | tuple[str, ...]
    default: Any = REQUIRED
    to: Callable[[Any, Mapping[str, Any]], Any] | None = None
    back: Callable[[Any, Any], Any] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The provider's attributes."""
        return (self.megatron,) if isinstance(self.megatron, str) else self.megatron

    def read(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The provider's attributes as ``config`` sets them.

        Raises:
            UserError: the key is missing, or its value cannot be represented.
        """
        value = config.get(self.hf, self.default)
        if value is REQUIRED:
            raise UserError(f"key {self.hf} is missing")
        found = self.to(value, config) if self.to else value
        if isinstance(self.megatron, str):
            return {self.megatron: found}
        values: Sequence[Any] = found if self.to else [found] * len(self.megatron)
        return dict(zip(self.megatron, values, strict=True))

    def write(self, provider: Any) -> Any:
        """The key's value as ``provider`` has it."""
        values = tuple(getattr(provider, name) for name in self.names)
        value = values[0] if isinstance(self.megatron, str) else values
        if self.back:
            return self.back(value, provider)
        return values[0]


# key -> the values with which it changes nothing; None: with no value does it change anything
IRRELEVANT: dict[str, tuple[Any, ...] | None] = {
    **dict.fromkeys(
        (
            "_attn_implementation",
            "_attn_implementation_autoset",
            "_commit_hash",
            "_name_or_path",
            "architectures",
            "auto_map",
            "bos_token_id",
            "chunk_size_feed_forward",
            "eos_token_id",
            "finetuning_task",
            "id2label",
            "is_llama_config",
            "label2id",
            "model_type",
            "output_attentions",
            "output_hidden_states",
            "pad_token_id",
            "prefix",
            "pretraining_tp",
            "problem_type",
            "return_dict",
            "sep_token_id",
            "task_specific_params",
            "tokenizer_class",
            "torch_dtype",
            "torchscript",
            "transformers.js_config",
            "transformers_version",
            "unsloth_fixed",
            "unsloth_version",
            "use_bfloat16",
            "use_cache",
        )
    ),
    "add_cross_attention": (False,),
    "is_decoder": (False, True),
    "is_encoder_decoder": (False,),
    "pruned_heads": ({}, None),
    "quantization_config": (None,),
    "rope_interleaved": (False,),
    "tie_encoder_decoder": (False,),
    # older configs carry generation defaults
    **dict.fromkeys(
        (
            "bad_words_ids",
            "begin_suppress_tokens",
            "decoder_start_token_id",
            "diversity_penalty",
            "do_sample",
            "early_stopping",
            "encoder_no_repeat_ngram_size",
            "exponential_decay_length_penalty",
            "forced_bos_token_id",
            "forced_eos_token_id",
            "length_penalty",
            "max_length",
            "max_new_tokens",
            "min_length",
            "no_repeat_ngram_size",
            "num_beam_groups",
            "num_beams",
            "num_return_sequences",
            "output_scores",
            "remove_invalid_values",
            "repetition_penalty",
            "return_dict_in_generate",
            "suppress_tokens",
            "temperature",
            "top_k",
            "top_p",
            "typical_p",
        )
    ),
}


def read_all(fields: Iterable[Field], config: Mapping[str, Any]) -> dict[str, Any]:
    """The provider's attributes that ``config`` sets.

    Raises:
        UserError: keys that are unknown, missing or out of range, all in one message.
    """
    fields = tuple(fields)
    problems = unknown_keys(fields, config)
    values: dict[str, Any] = {}
    for field in fields:
        try:
            values |= field.read(config)
        except UserError as error:
            problems.append(str(error))
    if problems:
        raise UserError("; ".join(problems))
    return values


def unknown_keys(fields: Iterable[Field], config: Mapping[str, Any]) -> list[str]:
    """One phrase for each key that no field claims and that could change the computation."""
    claimed = {field.hf for field in fields}
    problems: list[str] = []
    for key, value in config.items():
        if key in claimed:
            continue
        if key not in IRRELEVANT:
            hint = did_you_mean(key, claimed)
            problems.append(f"key {key}={value!r} is not known{hint or ', remove it if it changes nothing'}")
        elif (harmless := IRRELEVANT[key]) is not None and value not in harmless:
            problems.append(f"{key}={value!r} is not supported")
    return problems


def write_all(fields: Iterable[Field], provider: Any) -> dict[str, Any]:
    """The Hugging Face config, as far as the fields cover it."""
    return {field.hf: field.write(provider) for field in fields}


def changed_keys(fields: Iterable[Field], provider: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys whose value in ``config`` no longer means what ``provider`` has, with their new values."""
    changed: dict[str, Any] = {}
    for field in fields:
        meant = field.read(config)
        if any(getattr(provider, name) != value for name, value in meant.items()):
            value = field.write(provider)
            if value != config.get(field.hf):
                changed[field.hf] = value
    return changed


# ---- conversions of single values ------------------------------------------------------------------------------

_ACTIVATIONS: dict[str, Callable[..., torch.Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "relu": F.relu,
    "relu2": squared_relu,
}


def _activation(name: Any, _: Mapping[str, Any]) -> Callable[..., torch.Tensor]:
    if name not in _ACTIVATIONS:
        raise UserError(f"hidden_act={name!r} is not supported: {', '.join(_ACTIVATIONS)} are")
    return _ACTIVATIONS[name]


def _activation_name(function: Any, _: Any) -> str:
    return next(name for name, known in _ACTIVATIONS.items() if known is function)


def _rope(parameters: Any, config: Mapping[str, Any]) -> tuple[dict[str, Any] | None, float]:
    """(scaling without its base, base); no scaling at all is None."""
    parameters = dict(parameters or {})
    check_parameters(parameters)
    parameters.pop("type", None)
    base = parameters.pop("rope_theta", None)
    if base is None:
        base = config.get("rope_theta") or 10000.0
    scaling = {key: value for key, value in parameters.items() if value is not None}
    plain = scaling.get("rope_type", "default") == "default"
    if plain and scaling.get("partial_rotary_factor", 1.0) != 1.0:
        raise UserError(
            f"rope_parameters.partial_rotary_factor={scaling['partial_rotary_factor']} is not supported"
        )
    return None if plain else scaling, base


def _rope_back(values: tuple[dict[str, Any] | None, float], _: Any) -> dict[str, Any]:
    scaling, base = values
    return {"rope_type": "default", **(scaling or {}), "rope_theta": base}


def _precision(dtype: Any, _: Mapping[str, Any]) -> tuple[torch.dtype, bool, bool]:
    """(dtype of the parameters, bf16, fp16)."""
    from megatron.bridge.models.hf_pretrained.causal_lm import to_dtype

    found = to_dtype(dtype) or torch.float32
    if found not in (torch.float32, torch.bfloat16, torch.float16):
        raise UserError(f"dtype={dtype} is not supported: float32, bfloat16 and float16 are")
    return found, found is torch.bfloat16, found is torch.float16


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


def _with_any_bias(own: bool, config: Mapping[str, Any]) -> tuple[bool, bool]:
    """(this bias, whether the model has any): Megatron-Core has one switch, refined by the provider's two."""
    return own, bool(config.get("attention_bias") or config.get("mlp_bias"))


def _first(values: tuple[Any, ...], _: Any) -> Any:
    return values[0]


# ---- groups that families share ---------------------------------------------------------------------------------

DTYPE = Field("dtype", ("params_dtype", "bf16", "fp16"), default=None, to=_precision, back=_precision_back)

DENSE: tuple[Field, ...] = (
    DTYPE,
    Field("vocab_size", "vocab_size"),
    Field("hidden_size", "hidden_size"),
    Field("intermediate_size", "ffn_hidden_size"),
    Field("num_hidden_layers", "num_layers"),
    Field("num_attention_heads", "num_attention_heads"),
    Field("num_key_value_heads", "num_query_groups", default=None, to=_or_heads),
    Field("head_dim", "kv_channels", default=None, to=_head_width),
    Field("hidden_act", "activation_func", default="silu", to=_activation, back=_activation_name),
    Field("max_position_embeddings", ("max_position_embeddings", "seq_length")),
    Field("initializer_range", "init_method_std", default=0.02),
    Field("rms_norm_eps", "layernorm_epsilon"),
    Field("tie_word_embeddings", "share_embeddings_and_output_weights", default=False),
    Field("attention_dropout", "attention_dropout", default=0.0),
    Field("rope_parameters", ("rope_parameters", "rotary_base"), default=None, to=_rope, back=_rope_back),
)

BIASES: tuple[Field, ...] = (
    Field("attention_bias", ("attention_bias", "add_bias_linear"), default=False, to=_with_any_bias, back=_first),
    Field("mlp_bias", ("mlp_bias", "add_bias_linear"), default=False, to=_with_any_bias, back=_first),
)
"""Attention (output projection included) and feed-forward biases, each on its own switch."""

LLAMA_LIKE: dict[str, Any] = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "position_embedding_type": "rope",
    "hidden_dropout": 0.0,
    # only as many rows of padding as the tensor-parallel ranks need: fewer numbers that Hugging Face has not
    "should_pad_vocab": True,
    "make_vocab_size_divisible_by": 1,
}
"""What these architectures imply and do not spell."""
