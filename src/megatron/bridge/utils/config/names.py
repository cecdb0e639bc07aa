# SPDX-License-Identifier: Apache-2.0
"""Objects that a config refers to by name: functions, classes, enum members and torch dtypes."""

import dataclasses
import enum
import importlib
import sys
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from megatron.bridge.utils.errors import UserError, did_you_mean

FORMER_NAMES: dict[str, str] = {}  # old names that files may still contain -> new names

# Part of the file format. Moving a class to another module changes a row here and no file; renaming one needs a row in
# FORMER_NAMES. Files written by version 0.1 hold the module path of that time: its last part is the name.
_NAMES_BY_MODULE = {
    "megatron.bridge.training.config": [
        "CheckpointConfig",
        "CommOverlapConfig",
        "ConfigContainer",
        "CriticConfig",
        "DPOConfig",
        "DistillConfig",
        "DistributedDataParallelConfig",
        "DistributedInitConfig",
        "FaultToleranceConfig",
        "GRPOConfig",
        "InProcessRestartConfig",
        "LoggerConfig",
        "MixedPrecisionConfig",
        "NVRxStragglerDetectionConfig",
        "OptimizerConfig",
        "ParameterOverride",
        "ProfilingConfig",
        "RNGConfig",
        "RerunStateMachineConfig",
        "RolloutServerConfig",
        "SchedulerConfig",
        "StragglerDetectionConfig",
        "TrainingConfig",
        "ValidationConfig",
    ],
    "megatron.bridge.data.config": [
        "BlendedDatasetConfig",
        "ClassificationDatasetConfig",
        "EmbeddingDatasetConfig",
        "FIMConfig",
        "FinetuningDatasetConfig",
        "GPTDatasetConfig",
        "MockGPTDatasetConfig",
        "PackedSequenceSpecs",
        "PreferenceDatasetConfig",
        "PromptDatasetConfig",
        "RerankDatasetConfig",
        "RewardDatasetConfig",
        "SFTDatasetConfig",
        "TokenClassificationDatasetConfig",
    ],
    "megatron.bridge.data.builders.hf_dataset": ["HFDatasetConfig"],
    "megatron.bridge.data.vlm_datasets": [
        "HFDatasetConversationProvider",
        "MockAudioConversationProvider",
        "MockVLMConversationProvider",
        "PreloadedVLMConversationProvider",
    ],
    "megatron.bridge.data.energon": ["EnergonProvider"],
    "megatron.bridge.data.records.presets": ["alpaca_example"],
    "megatron.bridge.data.tokenizer": ["TokenizerConfig"],
    "megatron.bridge.models.gpt_provider": ["GPTModelProvider"],
    "megatron.bridge.models.heterogeneous_provider": ["HeterogeneousModelProvider"],
    "megatron.bridge.models.mamba_provider": ["MambaModelProvider"],
    "megatron.bridge.models.mla_provider": ["MLAModelProvider"],
    "megatron.bridge.models.vision.provider": [
        "VisionGPTModelProvider",
        "VisionHybridModelProvider",
    ],
    "megatron.bridge.models.features.activations": ["gelu_fast", "gelu_new", "gelu_tanh", "xielu"],
    "megatron.bridge.backends.specs.layer_specs": ["decoder_block_spec", "layer_spec"],
    "megatron.bridge.compat.layer_specs": [
        "default_layer_spec",
        "local_layer_spec",
        "modelopt_mamba_stack_spec",
        "modelopt_transformer_layer_spec",
        "transformer_engine_layer_spec",
        "transformer_engine_mamba_stack_spec",
    ],
    "megatron.bridge.peft.canonical_lora": ["CanonicalLoRA"],
    "megatron.bridge.peft.vera": ["VeRA"],
    "megatron.bridge.peft.dora": ["DoRA"],
    "megatron.bridge.peft.lora": ["LoRA", "VLMLoRA"],
    "megatron.bridge.recipes.defaults": ["squad_example"],
}
"""Module -> the names under which its classes and functions are written to YAML."""
PUBLIC_NAMES = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names}
"""Name in YAML -> module that contains it."""


def import_path(name: str) -> str:
    """Return the dotted path of the object ``name`` in a file; a name of another package is its own path."""
    last = name.rpartition(".")[2] if name.startswith("megatron.bridge.") else name
    last = FORMER_NAMES.get(last, last)
    return f"{PUBLIC_NAMES[last]}.{last}" if last in PUBLIC_NAMES else name


TARGET = "_target_"  # key of a mapping that names a class, a function or a value
MARKERS = frozenset(
    {TARGET, "_call_", "_partial_", "_tuple_", "_path_"}
)  # reserved keys of plain data

# Some functions have a private module; these are their public names.
PUBLIC_HOMES = {"torch._C._nn": "torch.nn.functional"}

KNOWN_MODULES = (
    "torch.nn.functional",
    "torch.nn.init",
    "megatron.core.activations",
    "megatron.core.fusions.fused_bias_geglu",
    "megatron.core.transformer.enums",
)
"""Modules whose own functions and enum members a file may name, besides public names and torch's dtypes."""
KNOWN_NAMES = ("torch.sigmoid", "torch.tanh")

_imports = ContextVar("imports", default=False)


@contextmanager
def importing(allowed: bool = True) -> Generator[None]:
    """Allow ``locate`` to import any name inside the block, which can run code, if ``trust`` is true."""
    token = _imports.set(allowed or _imports.get())
    try:
        yield
    finally:
        _imports.reset(token)


def is_dtype(value: object) -> bool:
    """Return whether ``value`` is a ``torch.dtype``, without importing torch."""
    kind = type(value)
    return kind.__module__ == "torch" and kind.__name__ == "dtype"


def is_named(value: object) -> bool:
    """Return whether ``value`` is written by its name instead of its content."""
    return isinstance(value, (type, enum.Enum)) or is_dtype(value) or callable(value)


def name_of(value: Any) -> str | None:
    """Return the public or dotted name for which ``locate`` returns ``value``, or None if there is no such name.

    Example:
        >>> import textwrap
        >>> name_of(textwrap.dedent)
        'textwrap.dedent'
        >>> name_of(lambda: 0) is None
        True
    """
    return next((name for name in _candidates(value) if _is_found(name, value)), None)


def _candidates(value: Any) -> list[str]:
    if is_dtype(value):
        return [str(value)]
    if isinstance(value, enum.Enum):
        kind = type(value)
        return [f"{kind.__module__}.{kind.__qualname__}.{value.name}"]
    module = getattr(value, "__module__", None) or ""
    home = PUBLIC_HOMES.get(module, module)
    name = getattr(value, "__name__", "")
    qualname = getattr(value, "__qualname__", "")
    public = [name] if name in PUBLIC_NAMES and home.startswith("megatron.bridge.") else []
    # Functions such as torch.sigmoid are bound to a private class: their plain name in the same module is public.
    return [*public, f"{home}.{qualname}", f"{home}.{name}"]


def locate(name: str) -> Any:
    """Import the object ``name``: a public name, or the longest importable module prefix, followed by attributes.

    Raises:
        UserError: nothing has that name; the message says which part is unknown. Outside of ``importing``, names that
            are neither public nor known are refused.
    """
    parts = import_path(name).split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        hint = did_you_mean(name, PUBLIC_NAMES)
        raise UserError(
            f"{name!r} is neither a public name nor a dotted one such as torch.nn.functional.silu{hint}"
        )
    trusted = _imports.get()
    if not trusted and not _is_known(parts):
        _refuse_import(name)
    found, used = _longest_module(parts)
    for position in range(used, len(parts)):
        part = parts[position]
        if not hasattr(found, part):
            owner = ".".join(parts[:position])
            raise UserError(f"{owner} has nothing named {part!r}{did_you_mean(part, dir(found))}")
        found = getattr(found, part)
    if (
        not trusted
        and not _is_public(parts)
        and ".".join(parts) not in (*KNOWN_NAMES, *_candidates(found))
    ):
        _refuse_import(name)  # a known module may import objects from other modules
    return found


def _refuse_import(name: str) -> None:
    hint = did_you_mean(name.rpartition(".")[2], PUBLIC_NAMES)
    raise UserError(
        f"{name} is not a public name, and importing it could run code{hint}; if you trust the file, give "
        "--trust-config (for a checkpoint --trust-checkpoint, in Python trust=True)"
    )


def _is_public(parts: list[str]) -> bool:
    return PUBLIC_NAMES.get(parts[-1]) == ".".join(parts[:-1])


def _is_known(parts: list[str]) -> bool:
    module = ".".join(parts[:-1])
    last = parts[-1]
    if _is_public(parts):
        return True
    if module == "torch" and is_dtype(getattr(sys.modules.get("torch"), last, None)):
        return True
    known = module in KNOWN_MODULES or ".".join(parts[:-2]) in KNOWN_MODULES  # a member of an enum
    return ".".join(parts) in KNOWN_NAMES or known or _is_own_class(sys.modules.get(module), last)


def _is_own_class(module: Any, name: str) -> bool:
    """Return whether ``name`` is an imported dataclass of this package or of Megatron-Core, or extends one."""
    found = getattr(module, name, None)
    if not isinstance(found, type) or not dataclasses.is_dataclass(found):
        return False
    return any(
        base.__module__.startswith(("megatron.bridge.", "megatron.core.")) for base in found.__mro__
    )


def _longest_module(parts: list[str]) -> tuple[Any, int]:
    for used in range(len(parts), 0, -1):
        module = ".".join(parts[:used])
        if module in sys.modules:
            return sys.modules[module], used
        try:
            return importlib.import_module(module), used
        except ModuleNotFoundError as error:
            # If a prefix does not exist, a shorter one is tried; a module whose own import fails is an error.
            if error.name is None or not (
                module == error.name or module.startswith(error.name + ".")
            ):
                raise UserError(f"importing {module} failed: {error}") from error
    raise UserError(f"there is no module named {parts[0]!r}, needed for {'.'.join(parts)}")


def _is_found(name: str, value: object) -> bool:
    if name.startswith("__main__."):  # another process has another main module
        return False
    try:
        with importing():
            return locate(name) is value
    except UserError:
        return False
