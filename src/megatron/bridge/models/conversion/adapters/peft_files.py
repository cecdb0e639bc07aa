# SPDX-License-Identifier: Apache-2.0
"""Read an adapter in the format of the ``peft`` library, and refuse files that it could not have written."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import safetensors
import safetensors.torch
from torch import Tensor

from megatron.bridge.models.conversion.adapters.stacked_experts import (
    parameter_of,
    unstack_tensors,
)
from megatron.bridge.utils import strict_json
from megatron.bridge.utils.errors import UserError, one_line

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
A, B, MAGNITUDE = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"
EMBEDDING_A, EMBEDDING_B = "lora_embedding_A", "lora_embedding_B"
# ``peft`` stores the weights of adapted embeddings and output layers again
BASE_WEIGHT = "base_layer.weight"

# config keys that are read, that follow from the tensors, or that describe the initialization
_KNOWN = {
    "peft_type",
    "base_model_name_or_path",
    "r",
    "lora_alpha",
    "lora_dropout",
    "use_rslora",
    "use_dora",
    "rank_pattern",
    "alpha_pattern",
    "target_modules",
    "target_parameters",
    "exclude_modules",
    "layers_to_transform",
    "auto_mapping",
    "corda_config",
    "eva_config",
    "inference_mode",
    "layers_pattern",
    "loftq_config",
    "lora_ga_config",
    "megatron_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "task_type",
    "modules_to_save",
}
# other keys -> the values that have no effect
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "init_lora_weights": (
        True,
        False,
        "gaussian",
        "orthogonal",
        "eva",
    ),  # other values also change the base
}
# a repeated group that repeats something: matching could take forever
_NESTED_REPEAT = re.compile(r"\([^()]*[*+}][^()]*\)\)*[*+{]")
_UNSET: tuple[Any, ...] = (None, False, [], {})


def read(directory: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read the config and the tensors of a directory in the ``peft`` format; those of stacked experts one by one."""
    for name in (CONFIG, TENSORS):
        if not (directory / name).is_file():
            raise UserError(
                f"{directory} has no {name}: give a directory that peft's save_pretrained wrote"
            )
    config: Any = strict_json.read(directory / CONFIG)
    try:
        tensors = cast(Any, safetensors.torch).load_file(directory / TENSORS)
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise UserError(
            f"{directory / TENSORS} is damaged: {one_line(error)}; save the adapter again"
        ) from error
    if not isinstance(config, dict):
        raise UserError(f"{directory / CONFIG} is not a JSON object: save the adapter again")
    config = cast(dict[str, Any], config)
    if config.get("peft_type") != "LORA":
        raise UserError(
            f"the adapter {directory} is of type {config.get('peft_type')}: only LORA can be read"
        )
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.startswith("pissa"):
        raise UserError(
            f"the adapter {directory} has init_lora_weights={init!r}, which cannot be read: merge it instead, or save "
            "it with path_initial_model_for_weight_conversion of peft"
        )
    for key, value in config.items():
        if key not in _KNOWN and value not in _HARMLESS.get(key, _UNSET):
            raise UserError(
                f"the adapter {directory} has {key}={value!r}, which cannot be read: merge it instead"
            )
    _check_settings(config, directory)
    tensors = unstack_tensors(
        tensors,
        config.get("target_parameters"),
        (A, B),
        lambda parameter: rank_and_alpha(config, parameter.removeprefix(PREFIX))[0],
        directory,
    )
    _check_tensors(config, tensors, directory)
    return config, tensors


def _check_settings(config: Mapping[str, Any], directory: Path) -> None:
    """Refuse ranks, scales, targets and patterns that ``peft`` could not have written."""
    ranks: dict[str, Any] = {"r": config.get("r"), **_values_of("rank_pattern", config, directory)}
    alphas: dict[str, Any] = {"lora_alpha": config.get("lora_alpha")}
    alphas |= _values_of("alpha_pattern", config, directory)
    for key, value in ranks.items():
        if type(value) is not int or value < 1:
            raise UserError(
                f"the adapter {directory} has {key}={value!r}, but a rank is an integer of at least 1: save it again"
            )
    for key, value in alphas.items():
        if type(value) not in (int, float) or not math.isfinite(value):
            raise UserError(
                f"the adapter {directory} has {key}={value!r}, but an alpha is a finite number: save it again"
            )
    for key in ("target_modules", "exclude_modules"):
        value = config.get(key)
        is_list = isinstance(value, list) and all(
            isinstance(item, str) for item in cast("list[Any]", value)
        )
        if not (value is None or isinstance(value, str) or is_list):
            raise UserError(
                f"the adapter {directory} has {key}={value!r}, but it is a text or a list of texts: save it again"
            )


def _values_of(key: str, config: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Return the values of ``rank_pattern`` or ``alpha_pattern`` by the names for messages."""
    patterns: Any = config.get(key) or {}
    if not isinstance(patterns, dict):
        raise UserError(
            f"the adapter {directory} has {key}={patterns!r}, but it is an object: save it again"
        )
    values = cast("dict[str, Any]", patterns)
    for pattern in values:
        try:
            re.compile(pattern)
            problem = "repeats what is repeated already" if _NESTED_REPEAT.search(pattern) else None
        except re.error as error:
            problem = f"is no regular expression ({error})"
        if problem is not None:
            raise UserError(
                f"the adapter {directory} has {key}={pattern!r}, which {problem}: name the modules"
            )
    return {f"{key}[{pattern!r}]": value for pattern, value in values.items()}


def _check_tensors(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], directory: Path
) -> None:
    """Refuse values that are no finite numbers, factors without their counterpart, and ranks of another config."""
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise UserError(
                f"the adapter {directory} has {name} in {tensor.dtype}, but weights are floating point: save it again"
            )
        if not tensor.isfinite().all():
            raise UserError(
                f"the adapter {directory} has values in {name} that are NaN or infinite: train it again"
            )
    counterparts = {A: B, B: A, EMBEDDING_A: EMBEDDING_B, EMBEDDING_B: EMBEDDING_A}
    for name, tensor in tensors.items():
        for end, counterpart in counterparts.items():
            if not name.endswith(f".{end}"):
                continue
            module = name.removesuffix(f".{end}")
            if f"{module}.{counterpart}" not in tensors:
                raise UserError(
                    f"the adapter {directory} has {name} without {module}.{counterpart}: save it again"
                )
            rank = rank_and_alpha(config, module.removeprefix(PREFIX))[0]
            axis = 0 if end in (A, EMBEDDING_A) else 1
            if tensor.dim() != 2 or tensor.shape[axis] != rank:
                raise UserError(
                    f"the adapter {directory} has rank {rank} for {name}, whose shape is {list(tensor.shape)}: give "
                    "the config that belongs to the tensors"
                )


def rank_and_alpha(config: Mapping[str, Any], module: str) -> tuple[int, float]:
    """Return rank and alpha of a module; patterns are regular expressions that match the end of its name."""
    module = parameter_of(module) or module

    def of(patterns: Mapping[str, Any], default: Any) -> Any:
        matching_values = (
            value for key, value in patterns.items() if re.fullmatch(rf"(?:.*\.)?(?:{key})", module)
        )
        return next(matching_values, default)

    return of(config.get("rank_pattern") or {}, config["r"]), of(
        config.get("alpha_pattern") or {}, config["lora_alpha"]
    )
