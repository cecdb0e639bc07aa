# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingTypeStubs=false
"""Bridges, each of which converts one architecture, and their registry.

A user's bridge subclasses ``MegatronModelBridge`` and implements its methods. The families of this package subclass
``DecoderBridge`` and declare three things: fields, fixed values, and weights.
"""

import dataclasses
import importlib
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megatron.bridge.models.conversion import heads
from megatron.bridge.models.conversion.declare import fields as config_fields
from megatron.bridge.models.conversion.declare import vocabulary
from megatron.bridge.models.conversion.declare.blocks import Block, SizedBlock
from megatron.bridge.models.conversion.declare.fields import IRRELEVANT, Field
from megatron.bridge.models.conversion.engine.plan import (
    WeightConversionTask,
    megatron_local_name_to_global,
)
from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.models.hf_pretrained import transformers_reads
from megatron.bridge.models.hf_pretrained.quantization_configs import without_quantization
from megatron.bridge.models.hf_pretrained.safetensors_files import TensorEntry
from megatron.bridge.utils.errors import UserError, misspelling, one_line, refuse

__all__ = [
    "DecoderBridge",
    "HFWeightTriple",
    "HFWeightTuple",
    "MegatronModelBridge",
    "WeightConversionTask",
    "architectures",
    "bridge_for",
    "register_bridge",
]

HFWeight = str | dict[str, str]
_megatron_local_name_to_global = megatron_local_name_to_global  # as other programs import it


class HFWeightTuple(NamedTuple):
    """A Hugging Face tensor and its name."""

    param_name: str
    weight: Tensor


class HFWeightTriple(NamedTuple):
    """A Hugging Face tensor, its name, and the name of the Megatron parameter that it comes from."""

    param_name: str
    weight: Tensor
    megatron_name: str


@dataclass(frozen=True)
class Registration:
    """A bridge class and the arguments of its registration."""

    bridge: "type[MegatronModelBridge]"
    target: Any = None
    provider: Any = None
    model_type: str | None = None


_REGISTRY: dict[str, Registration] = {}
_OWN_FAMILIES = "megatron.bridge.models."
ENTRY_POINTS = "megatron_bridge.families"
"""The entry point group in which installed packages name modules that register bridges."""

B = TypeVar("B", bound="type[MegatronModelBridge]")


def _extended_registration(bridge: "type[MegatronModelBridge]") -> Registration:
    """Return the registration of the class that ``bridge`` extends; an empty one if it extends none."""
    for base in bridge.__mro__[1:]:
        for registration in _REGISTRY.values():
            if registration.bridge is base:
                return registration
    return Registration(bridge)


class MegatronModelBridge:
    """Convert one Hugging Face architecture.

    Subclasses implement ``provider_bridge`` and ``mapping_registry``. Architectures whose tensors must be computed also
    override the ``maybe_modify`` hooks.
    """

    buffers: ClassVar[tuple[str, ...]] = (
        "**.rotary_emb.inv_freq",
        "**.masked_bias",
        "**.attn.bias",
    )
    """Tensors of old checkpoints that are recomputed instead of loaded; an export writes them only if the source has
    them."""
    copies: ClassVar[Mapping[str, str]] = {}
    """Patterns of tensors that checkpoints may store twice, and the tensors that they must equal."""
    carried: ClassVar[tuple[str, ...]] = ()
    """Tensors of parts that are not converted, such as a vision tower: an export copies them from its source."""
    registration: ClassVar[Registration | None] = None
    head: str | None = None
    """The head of the Hugging Face class; None is the output layer of a causal language model."""

    @classmethod
    def register_bridge(
        cls, *, source: type | str, target: Any, provider: Any = None, model_type: str | None = None
    ) -> Callable[[B], B]:
        """Return a decorator that registers a bridge class for ``source``.

        Args:
            source: the transformers class, or its name if importing it would run remote code.
            target: the Megatron model class.
            provider: the provider class, for bridges that are declarations; None is that of the bridge that the
                class extends.
            model_type: ``model_type`` of the Hugging Face config, to write a config without a source; None is that
                of the bridge that the class replaces.
        """
        name = source if isinstance(source, str) else source.__name__

        def register(bridge: B) -> B:
            declared: Any = bridge
            extended = _extended_registration(bridge)
            provider_class = provider or extended.provider
            config_type = model_type
            if config_type is None and name in _REGISTRY and _REGISTRY[name] is extended:
                config_type = extended.model_type
            if issubclass(declared, DecoderBridge):
                refuse(_unknown_settings(declared, provider_class or GPTModelProvider))
            is_builtin = bridge.__module__.startswith(_OWN_FAMILIES)
            if not (
                is_builtin and name in _REGISTRY
            ):  # a user's bridge has priority, regardless of the import order
                _REGISTRY[name] = Registration(bridge, target, provider_class, config_type)
            return bridge

        return register

    def provider_bridge(self, hf_pretrained: Any) -> Any:
        """Return the provider for a model with ``hf_pretrained.config``."""
        raise NotImplementedError(f"{type(self).__name__} must define provider_bridge")

    def mapping_registry(self) -> MegatronMappingRegistry:
        raise NotImplementedError(f"{type(self).__name__} must define mapping_registry")

    def registry_for(self, config: Any) -> MegatronMappingRegistry:
        """Return the mappings of a model of the provider ``config``, because some names depend on its sizes."""
        del config
        return self.mapping_registry()

    def as_modules(self, registry: MegatronMappingRegistry) -> MegatronMappingRegistry:
        """Return ``registry`` under the module names of transformers, if those in a checkpoint differ."""
        return registry

    def carried_by(self, config: Any, entries: Mapping[str, TensorEntry]) -> tuple[str, ...]:
        """Return patterns of tensors that a model of the provider ``config`` lacks; an export copies them."""
        del config, entries
        return self.carried

    def spelled_as(
        self, registry: MegatronMappingRegistry, entries: Mapping[str, TensorEntry]
    ) -> MegatronMappingRegistry:
        """Return ``registry`` for the tensors of a checkpoint, if an architecture has several formats."""
        del entries
        return registry

    def replaced_by_head(self, config: Any) -> frozenset[str]:
        """Return the tensors of the output layer that a head of the provider ``config`` replaces."""
        if getattr(config, "head", None) is None:
            return frozenset()
        return heads.output_tensors(self.mapping_registry())

    def megatron_to_hf_config(self, provider: Any) -> dict[str, Any]:
        """Return the Hugging Face config of a provider, or an empty dict if the bridge does not implement it."""
        del provider
        return {}

    def changed_config(self, provider: Any, hf_config: Mapping[str, Any]) -> dict[str, Any]:
        """Return new values for the keys of ``hf_config`` that no longer describe ``provider``."""
        now = self.megatron_to_hf_config(provider)
        return {
            key: value for key, value in now.items() if key in hf_config and hf_config[key] != value
        }

    def config_of(self, provider: Any, source: Mapping[str, Any]) -> dict[str, Any]:
        """Return the Hugging Face config ``source``, updated to describe ``provider``, which may have changed."""
        known = self.megatron_to_hf_config(provider)
        lists: dict[str, Any] = {
            key: value for key, value in known.items() if isinstance(value, list)
        }
        now: dict[str, Any] = {**source, **self.changed_config(provider, source), **lists}
        return {
            key: value
            for key, value in now.items()
            if key in known or not _is_derived(key, value, source)
        }

    def maybe_modify_loaded_hf_weight(
        self, hf_param: HFWeight, hf_state_dict: Mapping[str, Tensor]
    ) -> Any:
        """Return the tensor to load for ``hf_param``, or tensors by role."""
        if isinstance(hf_param, str):
            return hf_state_dict[hf_param]
        return {role: hf_state_dict[name] for role, name in hf_param.items()}

    def maybe_modify_converted_hf_weight(
        self,
        task: WeightConversionTask,
        converted_weights_dict: dict[str, Tensor],
        hf_state_dict: Mapping[str, Tensor],
    ) -> dict[str, Tensor]:
        """Return the tensors to export for ``task``; ``hf_state_dict`` is the source's, or empty without a source."""
        del task, hf_state_dict
        return converted_weights_dict

    @property
    def computes_on_load(self) -> bool:
        """Whether loading must call the hook for each tensor."""
        base = MegatronModelBridge.maybe_modify_loaded_hf_weight
        return type(self).maybe_modify_loaded_hf_weight is not base

    @property
    def computes_on_export(self) -> bool:
        """Whether an export must call the hook for each tensor."""
        base = MegatronModelBridge.maybe_modify_converted_hf_weight
        return type(self).maybe_modify_converted_hf_weight is not base


class DecoderBridge(MegatronModelBridge):
    """A declarative bridge: config fields, values that Hugging Face implies, and blocks of weights."""

    fields: ClassVar[tuple[Field, ...]] = ()
    fixed: ClassVar[dict[str, Any]] = {}
    weights: ClassVar[tuple[Block | SizedBlock, ...]] = ()
    irrelevant: ClassVar[config_fields.HarmlessKeys] = {}
    """Keys without effect in this architecture, in addition to those of every architecture."""
    has_padding_row: ClassVar[bool] = True
    """transformers' model gives ``pad_token_id`` to its embedding, so that row has no gradient from inputs."""

    unread_keys: Mapping[str, Any] = MappingProxyType({})
    """Dotted keys of the last config read that transformers' model never reads, with their values."""

    def __init_subclass__(cls) -> None:
        """Refuse an inconsistent declaration and report all its mistakes."""
        super().__init_subclass__()
        refuse(f"{cls.__name__}.{problem}" for problem in _declaration_mistakes(cls))

    def provider_bridge(self, hf_pretrained: Any) -> Any:
        """Return the provider with the attributes from the fields and the fixed values.

        Keys that transformers' own model never reads cannot change what it computes: they are left out and listed in
        ``unread_keys``.

        Raises:
            ConfigError: a key of the config is unknown, missing, or cannot be represented.
        """
        config = without_quantization(as_dict(hf_pretrained.config))
        raw = getattr(hf_pretrained, "raw_config", config)
        readable, provider = self._read(config, raw)
        self.unread_keys = unread_values(config, readable)
        return provider

    def _read(
        self, config: Mapping[str, Any], raw: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], Any]:
        """Return ``config`` without keys that stand in the way and that transformers never reads, and its provider."""
        while True:
            try:
                return config, self.provider_of(config, raw)
            except config_fields.ConfigError as error:
                unread = transformers_reads.unread_keys(config, error.removable, raw)
                if not unread:
                    raise config_fields.ConfigError(
                        [f"config of {self._architecture}: {error}"], error.removable
                    ) from error
                for key in unread:
                    config = transformers_reads.without_key(config, key)

    def provider_of(self, config: Mapping[str, Any], raw: Mapping[str, Any]) -> Any:
        """Return the provider that a config describes.

        Args:
            config: the complete config, as transformers' class of it writes it.
            raw: the same as in ``config.json``.

        Raises:
            ConfigError: a key of the config is unknown, missing, or cannot be represented.
        """
        del raw
        irrelevant = {
            **IRRELEVANT,
            **(heads.IRRELEVANT_WITH_HEAD if self.head else {}),
            **self.irrelevant,
        }
        values = config_fields.read_all(self.fields, config, irrelevant, _key_hint)
        settings = {**self.fixed, **values, **heads.read(self.head, config)}
        padding_idx = self._padding_idx(config, settings.get("vocab_size"))
        if padding_idx is not None:
            settings["embedding_padding_idx"] = padding_idx
        return self._provider(**settings)

    def _padding_idx(self, config: Mapping[str, Any], vocab_size: int | None) -> int | None:
        """Return the row that transformers' embedding does not train, if it has one."""
        token = config.get("pad_token_id")
        if not self.has_padding_row or not isinstance(token, int) or vocab_size is None:
            return None
        row = token if token >= 0 else vocab_size + token  # torch counts negative rows from the end
        return row if 0 <= row < vocab_size else None

    def mapping_registry(self) -> MegatronMappingRegistry:
        """Return the mappings of all blocks whose names do not depend on the size of the model."""
        return _make_registry(block for block in self.weights if not callable(block))

    def registry_for(self, config: Any) -> MegatronMappingRegistry:
        declared = _make_registry(
            block(config) if callable(block) else block for block in self.weights
        )
        if type(self).mapping_registry is not DecoderBridge.mapping_registry:
            of_blocks = DecoderBridge.mapping_registry(self)
            declared = declared.with_changes(of_blocks, self.mapping_registry())
        return heads.with_head(
            declared,
            config,
            self.registration.model_type if self.registration else None,
        )

    def spelled_as(
        self, registry: MegatronMappingRegistry, entries: Mapping[str, TensorEntry]
    ) -> MegatronMappingRegistry:
        """Return ``registry`` for the checkpoint, which may also be the bare decoder's."""
        return heads.without_prefix(registry, entries)

    def megatron_to_hf_config(self, provider: Any) -> dict[str, Any]:
        """Return all keys of the fields and the name of the architecture."""
        registration = self.registration
        known: dict[str, Any] = {"architectures": [self._architecture]}
        if registration is not None and registration.model_type:
            known["model_type"] = registration.model_type
        if self.has_padding_row:
            known["pad_token_id"] = provider.embedding_padding_idx
        return {
            **known,
            **config_fields.write_all(self.fields, provider),
            **heads.changed_keys(provider, known),
        }

    def changed_config(self, provider: Any, hf_config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keys whose meaning changed, so that a synonym in the source stays as it is.

        Raises:
            UserError: no config of the architecture can describe what the model computes.
        """
        if unsaid := self._unsaid(provider):
            raise UserError(
                f"a config of {self._architecture} cannot express {', '.join(unsaid)}, so transformers would compute "
                "something else: write only the weights (save_hf_weights)"
            )
        readable, _ = self._read(hf_config, hf_config)
        changed = config_fields.changed_keys(self.fields, provider, readable)
        if changed:
            # lists are written as they are, also where they depend on a key that changed
            self._check_read_back(provider, readable, changed)
        return {**changed, **heads.changed_keys(provider, hf_config)}

    def _check_read_back(
        self, provider: Any, source: Mapping[str, Any], changed: Mapping[str, Any]
    ) -> None:
        """Refuse a provider if its config describes another one: a config can have values that its class ignores.

        Args:
            provider: what was trained.
            source: the config that it was made from.
            changed: new values of keys of ``source``.
        """
        written = config_fields.write_all(self.fields, provider)
        lists: dict[str, Any] = {
            key: value for key, value in written.items() if isinstance(value, list)
        }
        described: dict[str, Any] = {**source, **changed, **lists}
        reason = "transformers would read it as another model"
        try:
            _, read_again = self._read(described, described)
        except config_fields.ConfigError as error:
            _, read_again = self._read(source, source)
            reason = str(error)
            different_keys = set(changed)
        else:
            rewritten = config_fields.write_all(self.fields, read_again)
            different_keys = {key for key, value in written.items() if rewritten.get(key) != value}
        lost = [
            f"{name}={getattr(provider, name)!r}"
            for field in self.fields
            if field.hf in different_keys
            for name in field.names
            if _effective_value(provider, name) != _effective_value(read_again, name)
        ]
        if lost:
            raise UserError(
                f"a config of {self._architecture} cannot express {', '.join(lost)} ({reason}): set what its config "
                "has, or write only the weights (save_hf_weights)"
            )

    def can_say(self, provider: Any) -> bool:
        """Return whether a config of this architecture can describe the model."""
        return type(provider) is self._provider and not self._unsaid(provider)

    def _unsaid(self, provider: Any) -> list[str]:
        """Return settings that this architecture cannot express, as ``name=value``."""
        expressible = {name for field in self.fields for name in field.names}
        implied = {
            field.name: field.default for field in dataclasses.fields(self._provider)
        } | self.fixed
        names = (
            name
            for name in sorted(function_fields() - expressible)
            if name in implied and hasattr(provider, name)
        )
        return [
            f"{name}={value!r}"
            for name in names
            if (value := getattr(provider, name)) not in (implied[name], _NEUTRAL.get(name))
        ]

    @property
    def _architecture(self) -> str:
        return next(name for name, entry in _REGISTRY.items() if entry.bridge is type(self))

    @property
    def _provider(self) -> Any:
        return (self.registration.provider if self.registration else None) or GPTModelProvider


def unread_values(config: Mapping[str, Any], readable: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that ``readable`` lacks, by their dotted keys in ``config``."""
    remaining = set(config_fields.dotted_keys(readable))
    missing = (key for key in config_fields.dotted_keys(config) if key not in remaining)
    return {key: transformers_reads.value_at(config, key) for key in missing}


def _declaration_mistakes(bridge: type[DecoderBridge]) -> Iterator[str]:
    """Yield a phrase for each value of a wrong type, and for each key that two fields read."""
    for index, field in enumerate(cast("tuple[Any, ...]", bridge.fields)):
        if not isinstance(field, Field):
            yield f"fields[{index}]={field!r} is not a Field: unpack a group with a star, as in (*DENSE, ROPE)"
    for index, block in enumerate(cast("tuple[Any, ...]", bridge.weights)):
        if not (isinstance(block, tuple) or callable(block)):
            yield f"weights[{index}]={block!r} is not a block: add blocks without a star, and a mapping as (mapping,)"
    for key, values in cast("dict[str, Any]", bridge.irrelevant).items():
        if not (values is None or isinstance(values, tuple)):
            yield f"irrelevant[{key!r}]={values!r} must be a tuple of harmless values, ({values!r},), or None"
    read = [
        (f.hf, name)
        for f in cast("tuple[Any, ...]", bridge.fields)
        if isinstance(f, Field)
        for name in f.names
    ]
    for key, name in dict.fromkeys(pair for pair in read if read.count(pair) > 1):
        yield f"fields reads {key!r} twice into {name}: replace the first field with override(fields, own)"


def _unknown_settings(bridge: type[DecoderBridge], provider: Any) -> Iterator[str]:
    """Yield a phrase for each name in ``fields`` and ``fixed`` that the provider does not have."""
    known = {field.name for field in dataclasses.fields(provider)}
    declared = {name: f"fields sets {name}" for field in bridge.fields for name in field.names}
    for name, declaration in {
        **declared,
        **{name: f"fixed[{name!r}]" for name in bridge.fixed},
    }.items():
        if name not in known:
            yield f"{bridge.__name__}.{declaration}, which {provider.__name__} does not have{misspelling(name, known)}"


_OF_NO_FAMILY = {
    "moe_mlp_glu_interleave_size",
    "moe_router_force_biased",
    "moe_router_force_load_balancing",
    "moe_shared_expert_glu_interleave_size",
    "multi_latent_attention",
    "rope_scaling",
    "seq_len_interpolation_factor",
    "use_mup",
}
"""Provider attributes that change what a trained model computes, and that no bridge sets."""
_NEUTRAL = {"seq_len_interpolation_factor": 1}
"""Attribute -> a value beside its default with which it changes nothing."""

# attributes that bridges set, but that do not change what a trained model computes: layout, precision, losses
_OF_TRAINING = {
    "params_dtype",
    "bf16",
    "fp16",
    "seq_length",
    "should_pad_vocab",
    "make_vocab_size_divisible_by",
    "attention_dropout",
    "hidden_dropout",
    "embedding_dropout",
    "init_method_std",
    "mtp_num_layers",
    "mamba_first_step_min",
    "mamba_first_step_max",
    "mamba_first_step_floor",
    "moe_grouped_gemm",
    "moe_token_dispatcher_type",
    "moe_router_dtype",
    "moe_router_load_balancing_type",
    "moe_aux_loss_coeff",
}


@cache
def function_fields() -> frozenset[str]:
    """Return the provider attributes that change what a trained model computes."""
    _load_families()
    bridges = [
        entry.bridge for entry in _REGISTRY.values() if issubclass(entry.bridge, DecoderBridge)
    ]
    settings = {
        name for fields in declared_fields().values() for field in fields for name in field.names
    }
    settings = settings.union(*(bridge.fixed for bridge in bridges)) - _OF_TRAINING
    return frozenset(settings | _OF_NO_FAMILY)


def _key_hint(key: str, claimed: Iterable[str]) -> str:
    families = families_that_read(key)
    return vocabulary.key_hint(key, claimed, families)


def declared_bridges() -> dict[str, type[DecoderBridge]]:
    known = {name: _REGISTRY[name].bridge for name in architectures()}
    return {name: bridge for name, bridge in known.items() if issubclass(bridge, DecoderBridge)}


def families_that_read(key: str) -> list[str]:
    return [
        name
        for name, fields in declared_fields().items()
        if any(field.hf == key for field in fields)
    ]


def declared_fields() -> dict[str, tuple[Field, ...]]:
    return {name: bridge.fields for name, bridge in declared_bridges().items()}


def registration_of(architecture: str) -> Registration:
    """Return what an architecture was registered with; a provider of None is ``GPTModelProvider``."""
    _load_families()
    return _REGISTRY[architecture]


def forget(architecture: str) -> None:
    """Undo the registration of an architecture, if there is one."""
    _REGISTRY.pop(architecture, None)


def _make_registry(blocks: Iterable[Block]) -> MegatronMappingRegistry:
    return MegatronMappingRegistry(*(mapping for block in blocks for mapping in block))


def register_bridge(
    architecture: str, *, provider: Any = None, model_type: str | None = None
) -> Callable[[B], B]:
    """Register a built-in family's bridge by name; see ``MegatronModelBridge.register_bridge``."""
    return MegatronModelBridge.register_bridge(
        source=architecture, target=GPTModel, provider=provider, model_type=model_type
    )


@cache
def _load_families() -> None:
    package = importlib.import_module(_OWN_FAMILIES.rstrip("."))
    for family in pkgutil.iter_modules(package.__path__, _OWN_FAMILIES):
        if not family.ispkg:
            continue
        folder = importlib.import_module(family.name)
        for module in pkgutil.iter_modules(folder.__path__, f"{family.name}."):
            if module.name.endswith("_bridge") and module.name != __name__:
                importlib.import_module(module.name)
    for point in metadata.entry_points(group=ENTRY_POINTS):
        _load_installed(point)


def _load_installed(point: metadata.EntryPoint) -> None:
    """Import the bridges that other installed packages declare, which registers them."""
    try:
        point.load()
    except Exception as error:
        package = point.dist.name if point.dist else "unknown"
        raise UserError(
            f"the package {package} declares families in {point.value}, which cannot be imported "
            f"({type(error).__name__}: {one_line(error)}): fix or uninstall the package"
        ) from error


def architectures() -> list[str]:
    """Return the names of the Hugging Face architectures that have a bridge."""
    _load_families()
    return sorted(_REGISTRY)


_DERIVED_FROM_SIZES: Mapping[str, Callable[[Any], Any]] = {
    "kv_channels": lambda provider: provider.hidden_size // provider.num_attention_heads,
    "num_query_groups": lambda provider: provider.num_attention_heads,
    "ffn_hidden_size": lambda provider: 4 * provider.hidden_size,
    "max_position_embeddings": lambda provider: provider.seq_length,
    "attention_bias": lambda provider: provider.add_bias_linear,
    "attention_output_bias": lambda provider: provider.add_bias_linear,
    "mlp_bias": lambda provider: provider.add_bias_linear,
}
"""Settings that a provider may leave open -> their values when the model is built."""


def _effective_value(provider: Any, name: str) -> Any:
    value = getattr(provider, name)
    derive = _DERIVED_FROM_SIZES.get(name)
    return derive(provider) if value is None and derive is not None else value


def bridge_for(config: Any) -> MegatronModelBridge:
    """Return a bridge for the architecture of a Hugging Face config.

    Raises:
        UserError: the config names no architecture, or no supported one.
    """
    names = list(map(registered_name, getattr(config, "architectures", None) or ()))
    if not names:
        raise UserError(
            "the config names no architecture: add `architectures`, such as ['LlamaForCausalLM']"
        )
    known = architectures()
    for name in names:
        headed = None if name in known else _headed_class_of(name, config)
        if name in known or headed is not None:
            registration = _REGISTRY[headed.causal if headed else name]
            bridge = registration.bridge()
            bridge.registration = registration  # type: ignore[misc]
            bridge.head = headed.head if headed else None
            return bridge
    hint = misspelling(names[0], known) or (
        ": AutoBridge.list_supported_models() lists those that are, `megatron-bridge port` drafts a bridge for "
        "others and docs/adding-a-family.md explains it"
    )
    raise UserError(f"architecture {names[0]} is not supported{hint}")


def is_known(config: Any) -> bool:
    """Return whether there is a bridge for one of the architectures in a Hugging Face config."""
    names = map(registered_name, getattr(config, "architectures", None) or ())
    return any(
        name in architectures() or _headed_class_of(name, config) is not None for name in names
    )


def registered_name(architecture: str) -> str:
    """Return the registered name that differs only in case: Microsoft writes PhiMoE, transformers Phimoe."""
    spelled = {name.lower(): name for name in architectures()}
    return (
        architecture
        if architecture in _REGISTRY
        else spelled.get(architecture.lower(), architecture)
    )


def _headed_class_of(architecture: str, config: Any) -> heads.HeadedClass | None:
    """Return the description of a class with a head if the bridge of its decoder is declarative."""
    described = heads.headed_class(architecture, getattr(config, "model_type", None))
    if described is None or described.causal.endswith(
        "ForConditionalGeneration"
    ):  # models with images are more than a decoder
        return None
    return described if described.causal in declared_bridges() else None


def _is_derived(key: str, value: Any, config: Mapping[str, Any]) -> bool:
    """Return whether transformers derives the key: a value per layer, or the rotated width of latent attention."""
    per_layer = isinstance(value, list) and len(cast("list[Any]", value)) == config.get(
        "num_hidden_layers"
    )
    return per_layer or (key in ("head_dim", "qk_head_dim") and "qk_rope_head_dim" in config)


def as_dict(config: Any) -> dict[str, Any]:
    """Return a Hugging Face config, or a plain mapping, as a dict."""
    return (
        dict(cast(Mapping[str, Any], config)) if isinstance(config, Mapping) else config.to_dict()
    )
