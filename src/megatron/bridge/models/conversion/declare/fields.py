# SPDX-License-Identifier: Apache-2.0
"""Convert keys of a Hugging Face config to the provider's attributes, and back.

Every key of a config is claimed by a field, listed as irrelevant, or refused by name: ignoring a key could change what
the model computes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

from megatron.bridge.utils.errors import UserError, misspelling

REQUIRED: Any = object()  # marks a field whose key is required

ABSENT: Any = object()  # marks a key that a field leaves out of the config


@dataclass(frozen=True)
class Field:
    """One key and the attributes that it sets."""

    hf: str  # key of the Hugging Face config
    megatron: str | tuple[str, ...]  # attribute of the provider, or several
    default: Any = REQUIRED  # value to use if the key is missing
    to: Callable[[Any, Mapping[str, Any]], Any] | None = None
    """(value, whole Hugging Face config) -> value, or values, of ``megatron``; None copies the value."""
    back: Callable[[Any, Any], Any] | None = None
    """(value or values, provider) -> value of ``hf``; None copies the first value that is set."""
    derived: Mapping[str, Callable[[Any], Any]] = MappingProxyType({})
    """Keys that transformers computes from this one, and that some configs have, too: key -> its value, from the
    provider."""

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the provider's attributes."""
        return (self.megatron,) if isinstance(self.megatron, str) else self.megatron

    def read(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the provider's attributes from ``config``.

        Raises:
            UserError: the key is missing, or its value cannot be represented.
        """
        value = config.get(self.hf, self.default)
        if value is REQUIRED:
            raise UserError(f"key {self.hf} is missing")
        megatron_value = self.to(value, config) if self.to else value
        if isinstance(self.megatron, str):
            return {self.megatron: megatron_value}
        values: Sequence[Any] = megatron_value if self.to else [megatron_value] * len(self.megatron)
        return dict(zip(self.megatron, values, strict=True))

    def write(self, provider: Any) -> Any:
        """Return the key's value from ``provider``."""
        values = tuple(getattr(provider, name) for name in self.names)
        value = values[0] if isinstance(self.megatron, str) else values
        if self.back:
            return self.back(value, provider)
        # max_position_embeddings may be unset, and seq_length is not
        return next((value for value in values if value is not None), None)


def constant(key: str, *values: Any) -> Field:
    """Field for a key that has one of ``values`` in all models of an architecture; configs get the first value."""

    def check(value: Any, _: Mapping[str, Any]) -> tuple[()]:
        _refuse_others(key, value, values)
        return ()

    return Field(key, (), default=values[0], to=check, back=lambda _, __: values[0])


def named(key: str, megatron: str, names: Mapping[Any, Any], default: Any = REQUIRED) -> Field:
    """Field for a key with names as values: Hugging Face's name -> the provider's name."""

    def to(value: Any, _: Any) -> Any:
        _refuse_others(key, value, names)
        return names[value]

    def back(megatron_value: Any, _: Any) -> Any:
        return next(
            (name for name, megatron_name in names.items() if megatron_name == megatron_value), None
        )

    return Field(key, megatron, default=default, to=to, back=back)


def _refuse_others(key: str, value: Any, known: Iterable[Any]) -> None:
    if value not in known:
        raise UserError(f"{key}={value!r} is not supported: {' and '.join(map(repr, known))} are")


def optional(key: str, megatron: str, default: int = 0) -> Field:
    """Field for a number of which 0 means None."""
    return Field(
        key,
        megatron,
        default=default,
        to=lambda count, _: count or None,
        back=lambda count, _: count or 0,
    )


def read_by_others(key: str, default: Any, back: Callable[[Any], Any]) -> Field:
    """Field for a key that the ``to`` of other fields reads; ``back`` gets the provider."""

    def nothing(_: Any, __: Any) -> tuple[()]:
        return ()

    return Field(key, (), default=default, to=nothing, back=lambda _, provider: back(provider))


def override(fields: Iterable[Field], *replacements: Field) -> tuple[Field, ...]:
    """Return ``fields``, in which an architecture's ``replacements`` replace the fields for the same attributes."""
    taken = {name for field in replacements for name in field.names}
    return (*(field for field in fields if not taken & set(field.names)), *replacements)


def kind_indices(
    key: str, kinds: Sequence[str], known: Sequence[str], config: Mapping[str, Any]
) -> list[int]:
    """Return each layer's kind from ``key`` of the config, as an index in ``known``.

    Raises:
        UserError: a kind is not known, or the list does not have one kind per layer.
    """
    for kind in sorted(set(kinds) - set(known)):
        raise UserError(f"{key}={kind!r} is not supported; known: {', '.join(known)}")
    if len(kinds) != config["num_hidden_layers"]:
        num_layers = config["num_hidden_layers"]
        raise UserError(
            f"{key} lists {len(kinds)} layers, num_hidden_layers={num_layers}: make them agree"
        )
    return [known.index(kind) for kind in kinds]


def layers_of_kind(key: str, megatron: str, kinds: tuple[str, str]) -> Field:
    """Return a field for the kind of each layer: 1 in the provider for the second of ``kinds``."""
    return Field(
        key,
        megatron,
        to=lambda names, config: kind_indices(key, names, kinds, config),
        back=lambda layers, _: [kinds[layer] for layer in layers],
    )


_UNUSED_KEYS = (
    # where the model comes from, and what made it
    "_commit_hash",
    "_name_or_path",
    "architectures",
    "auto_map",
    "finetuning_task",
    "is_llama_config",
    "model_type",
    "pretraining_tp",
    "tokenizer_class",
    "transformers.js_config",
    "transformers_version",
    "unsloth_fixed",
    "unsloth_version",
    # how transformers runs it
    "_attn_implementation",
    "_attn_implementation_autoset",
    "cache_implementation",
    "chunk_size_feed_forward",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "return_dict",
    "torch_dtype",
    "torchscript",
    "use_bfloat16",
    "use_cache",
    # tokens, and classes of other tasks
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "prefix",
    "sep_token_id",
    "id2label",
    "label2id",
    "problem_type",
    "task_specific_params",
    # generation defaults of older configs
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
"""Keys of any config that change nothing."""

_HARMLESS_VALUES: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "is_decoder": (False, True),
    "is_encoder_decoder": (False,),
    "pruned_heads": ({}, None),
    "quantization_config": (None,),
    "rope_interleaved": (False,),
    "tie_encoder_decoder": (False,),
}
"""Key -> the values with which it changes nothing."""

IRRELEVANT: dict[str, tuple[Any, ...] | None] = {**dict.fromkeys(_UNUSED_KEYS), **_HARMLESS_VALUES}
"""Key -> the values that have no effect; None: no value has an effect."""


HarmlessKeys = Mapping[str, tuple[Any, ...] | None]
"""Keys without effect: always (None), or only with the listed values."""

KeyHint = Callable[
    [str, Iterable[str]], str
]  # (unknown key, known keys) -> end of the message about the unknown key


def _unknown_key_hint(key: str, claimed: Iterable[str]) -> str:
    return misspelling(key, claimed) or ", remove it if it changes nothing"


class ConfigError(UserError):
    """Keys of a config that cannot be read.

    Args:
        problems: a phrase for each mistake.
        removable: dotted keys that the provider does not need; without them, the config describes the same model if
            transformers' own model never reads them.
    """

    def __init__(self, problems: Iterable[str], removable: Iterable[str] = ()) -> None:
        super().__init__("; ".join(dict.fromkeys(problems)))
        self.removable = tuple(dict.fromkeys(removable))


def read_all(
    fields: Iterable[Field],
    config: Mapping[str, Any],
    irrelevant: HarmlessKeys = IRRELEVANT,
    hint: KeyHint = _unknown_key_hint,
) -> dict[str, Any]:
    """Return the provider's attributes that ``config`` sets.

    Args:
        fields: what an architecture reads.
        config: the Hugging Face config.
        irrelevant: keys without effect, or the values with which they have none.
        hint: ends the message about an unknown key.

    Raises:
        ConfigError: keys are unknown, missing, out of range or contradict each other; one message lists all.
    """
    fields = tuple(fields)
    unknown = unknown_keys(fields, config, irrelevant, hint)
    problems = list(unknown.values())
    removable = list(unknown)
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for field in fields:
        try:
            attributes = field.read(config)
        except UserError as error:
            problems.append(str(error))
            removable += removable_keys(field, config)
            continue
        for name, value in attributes.items():
            if name in values and values[name] != value:
                first = origins[name]
                problems.append(
                    f"{first}={config.get(first)!r} and {field.hf}={config.get(field.hf)!r} set {name} to "
                    f"{values[name]!r} and to {value!r}: Megatron-Core has one setting for both, so make them agree"
                )
        values |= attributes
        origins |= dict.fromkeys(attributes, field.hf)
    if problems:
        raise ConfigError(problems, removable)
    return values


def removable_keys(field: Field, config: Mapping[str, Any]) -> list[str]:
    """Return the keys without which a field that refused its value may accept the config.

    A field that sets nothing only checks its key. The parts of a dict, such as ``rope_parameters``, can be removed one
    by one.
    """
    value = config.get(field.hf)
    if isinstance(value, Mapping):
        return [f"{field.hf}.{key}" for key in dotted_keys(cast(Mapping[str, Any], value))]
    return [] if field.names else [field.hf]


def dotted_keys(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the keys of all values in nested dicts."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from (f"{key}.{inner}" for inner in dotted_keys(cast(Mapping[str, Any], value)))
        else:
            yield key


def unknown_keys(
    fields: Iterable[Field],
    config: Mapping[str, Any],
    irrelevant: HarmlessKeys,
    hint: KeyHint = _unknown_key_hint,
) -> dict[str, str]:
    """Return a phrase for each key that no field claims and that could change the computation."""
    claimed = {field.hf for field in fields}
    problems: dict[str, str] = {}
    for key, value in config.items():
        if key in claimed:
            continue
        if key not in irrelevant:
            problems[key] = f"key {key}={value!r} is not known{hint(key, claimed)}"
        elif (harmless := irrelevant[key]) is not None and value not in harmless:
            problems[key] = f"{key}={value!r} is not supported"
    return problems


def write_all(fields: Iterable[Field], provider: Any) -> dict[str, Any]:
    """Return the part of the Hugging Face config that the fields cover."""
    written = {field.hf: field.write(provider) for field in fields}
    return {key: value for key, value in written.items() if value is not ABSENT}


def changed_keys(
    fields: Sequence[Field], provider: Any, config: Mapping[str, Any]
) -> dict[str, Any]:
    """Return new values for the keys whose values in ``config`` differ from ``provider``.

    The last field of a key writes it: ``intermediate_size`` is the width of experts where all layers have them.
    """
    changed: dict[str, Any] = {}
    writers = {field.hf: field for field in fields}
    for field in fields:
        meant = field.read(config)
        if any(getattr(provider, name) != value for name, value in meant.items()):
            value = writers[field.hf].write(provider)
            if value != config.get(field.hf):
                changed[field.hf] = value
    for field in fields:
        for key, value_from in field.derived.items():
            if key in config and config[key] != value_from(provider):
                changed[key] = value_from(provider)
    return changed
