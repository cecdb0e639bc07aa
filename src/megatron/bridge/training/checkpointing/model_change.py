# SPDX-License-Identifier: Apache-2.0
"""A resumed run must compute the function that it trained: settings that no tensor's shape shows are compared."""

from pathlib import Path
from typing import Any

from megatron.bridge.checkpoint import model_io, paths
from megatron.bridge.models.conversion.model_bridge import function_fields
from megatron.bridge.utils.config.serialize import to_plain
from megatron.bridge.utils.errors import UserError, did_you_mean

KEY = "model"
VOCABULARY = "vocab_size"  # ``model_io.check_vocabulary`` compares it


def function_of(provider: Any) -> dict[str, Any]:
    """The settings of a model that change what it computes, as plain data."""
    plain = to_plain(provider)
    return {name: plain[name] for name in sorted(function_fields() - {VOCABULARY}) if name in plain}


def check_same_function(provider: Any, saved: dict[str, Any], directory: Path, allowed: list[str]) -> None:
    """Refuse a model that computes another function than the model of a checkpoint.

    Earlier versions did not store the settings in the run state ``saved``; those that are ``allowed`` may differ
    (``checkpoint.allow_model_change``).
    """
    current = function_of(provider)
    for name in allowed:
        if name not in current:
            raise UserError(
                f"checkpoint.allow_model_change={allowed}: model.{name} does not change what the model computes"
                f"{did_you_mean(name, current)}"
            )
    before = saved.get(KEY) or _from_run_config(directory)
    changed = [
        f"model.{name} is {value!r}, in the checkpoint {before[name]!r}"
        for name, value in current.items()
        if name in before and name not in allowed and value != before[name]
    ]
    if changed:
        raise UserError(
            f"checkpoint {directory} is of a model that computes something else: {'; '.join(changed)}; use the "
            "checkpoint's values, or name what may change in checkpoint.allow_model_change"
        )


def _from_run_config(directory: Path) -> dict[str, Any]:
    if not (directory / paths.RUN_CONFIG).is_file():
        return {}  # Megatron-LM's
    model = model_io.read_run_config(directory)["model"]
    return model if isinstance(model, dict) else {}
