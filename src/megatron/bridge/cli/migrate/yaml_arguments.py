# SPDX-License-Identifier: Apache-2.0
"""The file of ``--yaml-cfg``, which replaces all arguments of Megatron-LM, as these arguments.

Megatron-LM passes the keys of its groups ``language_model`` and ``model_parallel`` to ``TransformerConfig``, and uses
all others as if they were arguments (``megatron/training/yaml_arguments.py``).
"""

import os
import re
from dataclasses import MISSING, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from megatron.bridge.utils.atomic import read_text
from megatron.bridge.utils.config import yaml_text
from megatron.bridge.utils.errors import UserError

_GROUPS = ("language_model", "model_parallel")
_VARIABLE = re.compile(r"\$\{(.*?)\}")
_ACTIVATIONS = {"swiglu": "swiglu", "squaredrelu": "squared-relu", "gelu": None}
"""``activation_func`` -> the argument that selects it; none for the default."""

_WITHOUT_EFFECT = {
    "async_tensor_model_parallel_allreduce",
    "batch_p2p_comm",
    "deallocate_pipeline_outputs",
    "gated_linear_unit",
    "overlap_p2p_comm",
    "params_dtype",
    "pipeline_dtype",
    "variable_seq_lengths",
    "virtual_pipeline_model_parallel_size",
}
"""Keys of the groups whose value Megatron-LM replaces, or that change no result."""

_DEFAULTS: dict[str, Any] = {
    "bert_binary_head": True,
    "check_for_nan_in_loss_and_grad": True,
    "delay_grad_reduce": True,
    "empty_unused_memory_level": 0,
    "manual_gc_eval": True,
    "mask_prob": 0.15,
    "retriever_seq_length": 256,
    "sample_rate": 1.0,
    "scatter_gather_tensors_in_pipeline": True,
    "short_seq_prob": 0.1,
    "vocab_extra_ids": 0,
}
"""Keys for which this package has no setting, with the value that changes nothing."""

_NEEDS = {
    "adlr_autoresume_interval": "adlr_autoresume",
    "cpu_offloading_*": "cpu_offloading",
    "manual_gc_interval": "manual_gc",
    "one_logger_*": "enable_one_logger",
    "profile_*": "profile",
    "save_interval": "save",
    "tp_comm_*": "tp_comm_overlap",
}
"""Keys -> the key without which they have no effect."""


def read_yaml_arguments(path: Path) -> list[str]:
    """Return the words of the command line that the file stands for.

    Raises:
        UserError: the file cannot be read, or a value has no meaning.
    """
    config = yaml_text.read(_with_variables(read_text(path, f"--yaml-cfg {path}"), path), str(path))
    if not isinstance(config, dict):
        raise UserError(
            f"--yaml-cfg {path}: write keys and values, as in Megatron-LM's gpt_config.yaml"
        )
    model: dict[str, Any] = {}
    config = _without_idle(config)
    for group in _GROUPS:
        values = config.pop(group, None) or {}
        if not isinstance(values, dict):
            raise UserError(f"--yaml-cfg {path}: {group} must have keys and values")
        model |= _without_idle(values)
    words = _model_words(model, path)
    for name, value in config.items():
        if isinstance(value, dict):
            raise UserError(
                f"--yaml-cfg {path}: {name} has keys of its own; only {' and '.join(_GROUPS)} have"
            )
        if name not in _DEFAULTS or value != _DEFAULTS[name]:
            # a flag that is false is one that is not given
            words += _words(name, value) if value is not False else []
    return words


def _without_idle(values: dict[str, Any]) -> dict[str, Any]:
    """Return the keys that have an effect: without those that only refine a key that is off."""
    idle = {
        name
        for name in values
        for pattern, needed in _NEEDS.items()
        if name != needed and fnmatchcase(name, pattern) and not values.get(needed)
    }
    return {name: value for name, value in values.items() if name not in idle}


def _with_variables(text: str, path: Path) -> str:
    """Replace ``${NAME}`` by the variable's value in the environment."""
    unset = [name for name in _VARIABLE.findall(text) if name not in os.environ]
    if unset:
        raise UserError(
            f"--yaml-cfg {path} has variables without a value: {', '.join(dict.fromkeys(unset))}; export them"
        )
    return _VARIABLE.sub(lambda match: os.environ[match[1]], text)


def _model_words(model: dict[str, Any], path: Path) -> list[str]:
    """Return the arguments for values of ``TransformerConfig`` that differ from its defaults."""
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    is_latent = model.get("multi_latent_attention", False)
    config_class = MLATransformerConfig if is_latent else TransformerConfig
    defaults = {entry.name: entry.default for entry in fields(config_class)}
    activation = model.pop("activation_func", "gelu")
    if activation not in _ACTIVATIONS:
        raise UserError(
            f"--yaml-cfg {path}: activation_func={activation} is none of {', '.join(_ACTIVATIONS)}"
        )
    argument = _ACTIVATIONS[activation]
    words = [] if argument is None else [f"--{argument}"]
    words += _fusion_words(model, activation)
    experts = model.pop("num_moe_experts", None)
    words += _words("num_experts", experts)
    groups = model.pop("num_query_groups", None)
    if groups is not None:
        words += ["--group-query-attention", "--num-query-groups", str(groups)]
    for name, value in model.items():
        is_default = defaults.get(name, MISSING) == value
        if is_default or name in _WITHOUT_EFFECT or name.startswith("_"):
            continue
        words += [f"--no-{_dashed(name)}"] if value is False else _words(name, value)
    return words


def _fusion_words(model: dict[str, Any], activation: str) -> list[str]:
    """Return the argument that switches the fused activation off, if the file does."""
    swiglu = model.pop("bias_swiglu_fusion", True)
    other = model.pop("bias_activation_fusion", False)
    if activation == "swiglu":
        return [] if swiglu else ["--no-bias-swiglu-fusion"]
    has_bias = model.get("add_bias_linear", True)
    return [] if other and not has_bias else ["--no-bias-gelu-fusion"]


def _words(name: str, value: Any) -> list[str]:
    if value is None or value == "":
        return []
    argument = f"--{_dashed(name)}"
    if value is True:
        return [argument]
    if isinstance(value, list):
        return [argument, *map(str, value)]
    words = str(value).split() if name.endswith("data_path") else [str(value)]
    return [argument, *words]


def _dashed(name: str) -> str:
    return name.replace("_", "-")
