# SPDX-License-Identifier: Apache-2.0
"""Ask transformers' own model what it reads: a key or tensor that it never reads cannot change its numbers.

The model of a config is built without memory (on the meta device), its config records which attributes are read, and
one forward pass of four tokens follows. This takes two to three seconds, nearly all of it the import of the model's
code, and happens only if a config has a key, or a checkpoint a tensor, that no declaration knows.
"""

import ast
import copy
import inspect
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import torch

_TOKENS = 4
_PATCH_LOCK = threading.Lock()

ReadName = tuple[str, str]
"""(name of the config's class, attribute or ``attribute.key`` of a dict)."""


def unread_keys(
    config: Mapping[str, Any], keys: Iterable[str], raw: Mapping[str, Any] | None = None
) -> list[str]:
    """Return those of ``keys`` that transformers' model of ``config`` never reads.

    Args:
        config: a config as ``to_dict`` of its transformers class returns it.
        keys: dotted names, such as ``mm_hidden_size``, ``text_config.qkv_bias`` or ``rope_parameters.finetuned``.
        raw: the same as in ``config.json``, before transformers renamed and completed it; None if there is no file.

    Returns:
        The unread keys in their order; none if transformers does not have the model.
    """
    keys = list(keys)
    model = _reference_model(config) if keys else None
    if model is None:
        return []
    return [key for key in keys if not _is_read(model, config if raw is None else raw, key)]


def unread_tensors(config: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Return those of the tensor ``names`` that transformers' model of ``config`` does not load.

    The names may be those of any checkpoint format that transformers reads for this model: its own renaming is applied.
    Tensors whose names show that a wrapper or an adapter wrote them are not among the result: transformers would ignore
    them, but the model that was trained is another one without them.

    Args:
        config: a config as ``to_dict`` of its transformers class returns it.
        names: tensors of a checkpoint.
    """
    candidates = [name for name in names if not is_of_wrapper(name)]
    model = _reference_model(config) if candidates else None
    if model is None:
        return []
    return [name for name in candidates if not model.loads(name)]


def renaming(config: Mapping[str, Any]) -> Callable[[str], str] | None:
    """Return how transformers renames tensors when it loads the model; None if it does not have the model."""
    model = _reference_model(config)
    return None if model is None else model.rename


_WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "base_model.model.")
_ADAPTERS = ("lora_", ".base_layer.", ".modules_to_save.", "adapter_", "ia3_l", "hada_", "lokr_")


def wrapper_prefix(name: str) -> str | None:
    """Return the prefix that a wrapper, such as ``DistributedDataParallel``, put before a tensor's name."""
    return next((prefix for prefix in _WRAPPERS if name.startswith(prefix)), None)


def is_of_wrapper(name: str) -> bool:
    """Return whether a tensor's name shows that a wrapper or an adapter wrote it."""
    inner = any(f".{prefix}" in name for prefix in _WRAPPERS)
    adapter = any(part in name for part in _ADAPTERS)
    return wrapper_prefix(name) is not None or inner or adapter


@dataclass(frozen=True)
class _ReferenceModel:
    """What was learned from transformers' model of one config."""

    config: Any
    reads: frozenset[ReadName]
    words: frozenset[str] | None
    """Names in the source code of the model's modules; None if the recorded reads are known to be complete."""
    tensors: Mapping[str, bool]
    """Names of the parameters and buffers, each with True, as transformers' renaming looks them up."""
    renamings: tuple[Any, ...]
    converters: tuple[Any, ...]
    prefix: str

    def reads_name(self, owner: str, name: str) -> bool:
        last = name.rpartition(".")[2]
        return (owner, name) in self.reads or (self.words is not None and last in self.words)

    def loads(self, name: str) -> bool:
        """Return whether a tensor of a checkpoint becomes a parameter or buffer of the model."""
        from transformers import core_model_loading

        with_prefix, _ = core_model_loading.rename_source_key(
            name, [], [], self.prefix, cast(Any, self.tensors)
        )
        return self.rename(name) in self.tensors or with_prefix in self.tensors

    def rename(self, name: str) -> str:
        """Return the name of the parameter or buffer that a checkpoint's tensor becomes, alone or with others."""
        from transformers import core_model_loading

        renamed, _ = core_model_loading.rename_source_key(
            name,
            list(self.renamings),
            list(self.converters),
            self.prefix,
            cast(Any, self.tensors),
        )
        return renamed


def _reference_model(config: Mapping[str, Any]) -> _ReferenceModel | None:
    """Build transformers' model of ``config`` and run it; return None if transformers has no such model."""
    return _examine_config(json.dumps(config, sort_keys=True, default=str))


@lru_cache(maxsize=16)
def _examine_config(as_json: str) -> _ReferenceModel | None:
    values = json.loads(as_json)
    config_class, model_class = _classes_of(values)
    if model_class is None:
        return None
    with quiet_transformers():
        try:
            config = config_class.from_dict(values)
            with _recording_reads(config) as recorder:
                with torch.device("meta"):
                    model = model_class._from_config(config).to(torch.bfloat16)
                ran = _run_model(model)
        except (
            Exception
        ):  # transformers refuses it, or cannot build it: nothing is known to be unread
            return None
    from transformers import conversion_mapping, core_model_loading

    transforms = conversion_mapping.get_model_conversion_mapping(model)
    renamings = tuple(t for t in transforms if isinstance(t, core_model_loading.WeightRenaming))
    converters = tuple(t for t in transforms if isinstance(t, core_model_loading.WeightConverter))
    return _ReferenceModel(
        config=config,
        reads=frozenset(recorder.reads),
        words=None if ran else _words_in_source(model),
        tensors=dict.fromkeys(model.state_dict(), True),
        renamings=renamings,
        converters=converters,
        prefix=model.base_model_prefix,
    )


def _classes_of(config: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return transformers' classes of a config and of its model, or None for the model if it has none."""
    import transformers

    kinds = cast(Any, transformers.CONFIG_MAPPING)
    config_class = kinds[config["model_type"]] if config.get("model_type") in kinds else None
    for name in config.get("architectures") or ():
        model_class = getattr(transformers, name, None)
        if config_class is not None and getattr(model_class, "config_class", None) is config_class:
            return config_class, model_class
    return config_class, None


def _run_model(model: Any) -> bool:
    """Run the model on a few tokens; return whether that ran all of its code that reads the config.

    A model with a tower is not run on images, whose inputs differ from family to family.
    """
    is_text_model = model.main_input_name == "input_ids" and not model.config.sub_configs
    tokens = torch.zeros(1, _TOKENS, dtype=torch.long, device="meta")
    try:
        with torch.no_grad():
            model.train()(input_ids=tokens)
            model.eval()(input_ids=tokens)
    except Exception:  # some layers, such as scans, compute with values, which meta tensors lack
        return False
    return is_text_model


def _words_in_source(model: Any) -> frozenset[str]:
    """Return all names and strings in the source code of the model's modules."""
    modules = {inspect.getmodule(type(module)) for module in model.modules()}
    words: set[str] = set()
    for module in modules:
        if module is None or not module.__name__.startswith("transformers."):
            continue
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(node, ast.Attribute):
                words.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                words.add(node.value)
    return frozenset(words)


class _Recorder:
    """Which attributes of configs, and which keys of their dicts, are read."""

    def __init__(self) -> None:
        self.reads: set[ReadName] = set()
        self.is_paused = False

    def record(self, owner: str, name: str) -> None:
        if not self.is_paused:
            self.reads.add((owner, name))


class _RecordingDict(dict[str, Any]):
    """A value of a config that is a dict, such as ``rope_parameters``.

    The names of its keys may be listed without being recorded, since their values are then read one by one. Python
    takes the values of a subclass that overrides ``__iter__`` one by one, too, in ``dict(...)`` and ``**``.
    """

    def __init__(
        self, values: Mapping[str, Any], owner: str, name: str, recorder: _Recorder
    ) -> None:
        super().__init__(values)
        self._owner = owner
        self._name = name
        self._recorder = recorder

    def _record(self, *keys: Any) -> None:
        for key in keys:
            self._recorder.record(self._owner, f"{self._name}.{key}")

    def __getitem__(self, key: str) -> Any:
        self._record(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self._record(key)
        return super().__contains__(key)

    def __iter__(self) -> Iterator[str]:
        return super().__iter__()

    def get(self, key: str, default: Any = None) -> Any:
        self._record(key)
        return super().get(key, default)

    def pop(self, key: str, *default: Any) -> Any:
        self._record(key)
        return super().pop(key, *default)

    def setdefault(self, key: str, default: Any = None) -> Any:
        self._record(key)
        return super().setdefault(key, default)

    def items(self) -> Any:
        self._record(*super().keys())
        return super().items()

    def values(self) -> Any:
        self._record(*super().keys())
        return super().values()

    def copy(self) -> dict[str, Any]:
        self._record(*super().keys())
        return super().copy()

    def __or__(self, mapping: Any) -> Any:
        return self.copy() | mapping

    def __deepcopy__(self, memo: Any) -> "_RecordingDict":
        values = {key: copy.deepcopy(value, memo) for key, value in dict.items(self)}
        return _RecordingDict(values, self._owner, self._name, self._recorder)


def _wrap_dicts(config: Any, recorder: _Recorder) -> None:
    """Replace the dicts in ``config`` and in its parts by dicts that record what is read."""
    from transformers import PreTrainedConfig

    for name, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            _wrap_dicts(value, recorder)
        elif isinstance(value, dict):
            vars(config)[name] = _wrap_dict(value, type(config).__name__, name, recorder)


def _wrap_dict(
    values: Mapping[str, Any], owner: str, name: str, recorder: _Recorder
) -> _RecordingDict:
    wrapped = dict(values)
    for key, value in values.items():
        if isinstance(value, dict):
            wrapped[key] = _wrap_dict(value, owner, f"{name}.{key}", recorder)
    return _RecordingDict(wrapped, owner, name, recorder)


@contextmanager
def _recording_reads(config: Any) -> Iterator[_Recorder]:
    """Record which attributes of configs are read, other than to write the config; other threads wait."""
    from transformers import PreTrainedConfig

    config_base = cast(Any, PreTrainedConfig)
    get_attribute = config_base.__getattribute__
    to_dict = config_base.to_dict
    recorder = _Recorder()

    def get_and_record(self: Any, name: str) -> Any:
        recorder.record(type(self).__name__, name)
        return get_attribute(self, name)

    def to_dict_unrecorded(self: Any) -> Any:
        was_paused = recorder.is_paused
        recorder.is_paused = True
        try:
            return to_dict(self)
        finally:
            recorder.is_paused = was_paused

    with _PATCH_LOCK:
        _wrap_dicts(config, recorder)
        config_base.__getattribute__ = get_and_record
        config_base.to_dict = to_dict_unrecorded
        try:
            yield recorder
        finally:
            config_base.__getattribute__ = get_attribute
            config_base.to_dict = to_dict


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence the warnings of transformers, for configs that the user never sees."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def _is_read(model: _ReferenceModel, raw: Mapping[str, Any], key: str) -> bool:
    """Return whether the model reads a key, or its config's class derives anything from it."""
    part, name = _part_of(model.config, key)
    owner = type(part).__name__
    target = part.attribute_map.get(name, name)
    synonyms = {old for old, new in part.attribute_map.items() if new == target}
    if any(model.reads_name(owner, alias) for alias in (name, target, *synonyms)):
        return True
    return _changes_config(type(model.config), raw, key)


def _part_of(config: Any, key: str) -> tuple[Any, str]:
    """Return the part of the config that has the key, and the key's name in it."""
    from transformers import PreTrainedConfig

    first, _, rest = key.partition(".")
    part = getattr(config, first, None)
    return _part_of(part, rest) if isinstance(part, PreTrainedConfig) and rest else (config, key)


def _changes_config(config_class: Any, raw: Mapping[str, Any], key: str) -> bool:
    """Return whether the config without the key differs in more than the key."""
    spellings = (key, key.replace("rope_parameters.", "rope_scaling."))  # of transformers 5 and 4
    for spelling in spellings:
        reduced = without_key(raw, spelling)
        if reduced == raw:
            continue
        try:
            with quiet_transformers():
                complete = config_class.from_dict(copy.deepcopy(dict(raw))).to_dict()
                changed = config_class.from_dict(copy.deepcopy(reduced)).to_dict()
        except Exception:  # the config needs the key
            return True
        for alias in spellings:
            complete = without_key(complete, alias)
            changed = without_key(changed, alias)
        return complete != changed
    return False  # transformers added the key itself, with its default


def without_key(values: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return ``values`` without a dotted key; dicts that do not contain it are shared with the result."""
    first, _, rest = key.partition(".")
    if not rest:
        return {name: value for name, value in values.items() if name != first}
    inner = values.get(first)
    if not isinstance(inner, Mapping):
        return dict(values)
    return {**values, first: without_key(cast(Mapping[str, Any], inner), rest)}


def value_at(values: Mapping[str, Any], key: str) -> Any:
    """Return the value of a dotted key."""
    first, _, rest = key.partition(".")
    return value_at(values[first], rest) if rest else values[first]
