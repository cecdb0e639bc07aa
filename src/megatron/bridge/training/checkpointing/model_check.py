# SPDX-License-Identifier: Apache-2.0
"""Compare what the model of a run computes with what the model of its checkpoint computed."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from megatron.bridge.checkpoint import model_io, paths
from megatron.bridge.checkpoint.collective import on_first_rank
from megatron.bridge.models.conversion.auto_bridge import AutoBridge
from megatron.bridge.models.conversion.model_bridge import bridge_for, function_fields
from megatron.bridge.models.hf_pretrained.hub import is_hf_model
from megatron.bridge.training.state import Run
from megatron.bridge.utils.config.serialize import TARGET, to_plain
from megatron.bridge.utils.console import print_rank_0
from megatron.bridge.utils.errors import UserError, did_you_mean

MODEL = "model"
"""Key of the settings of a model in the state of a run."""
VOCABULARY = "vocab_size"  # ``model_io.check_vocabulary`` compares it
_SEEN_IN_TENSORS = frozenset(
    {
        "ffn_hidden_size",
        "kv_channels",
        "num_query_groups",
        "max_position_embeddings",
        "vocab_size",
        "attention_bias",
        "attention_output_bias",
        "mlp_bias",
    }
)
"""Settings that may be None where another config has the derived value; tensors are compared, too."""


def function_of(provider: Any) -> dict[str, Any]:
    """The settings of a model that change what it computes, as plain data."""
    plain = to_plain(provider)
    return {name: plain[name] for name in sorted(function_fields() - {VOCABULARY}) if name in plain}


def check_same_function(
    provider: Any, saved: dict[str, Any], directory: Path, allowed: list[str]
) -> None:
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
    before = saved.get(MODEL) or _from_run_config(directory)
    changed = _changed_settings(current, before, allowed)
    if changed:
        raise UserError(
            f"checkpoint {directory} is of a model that computes something else: {'; '.join(changed)}; use the "
            "checkpoint's values, or name what may change in checkpoint.allow_model_change"
        )


def note_other_function(run: Run, path: Path) -> None:
    """Say with which settings the model computes something else than the model whose weights it starts from."""
    note = on_first_rank(lambda: describe_other_function(run.config.model, path))
    if note:
        print_rank_0(f"note: {note}")


def describe_other_function(provider: Any, path: Path) -> str | None:
    """Return a sentence if ``provider`` computes something else than the model of the weights in ``path``."""
    current = function_of(provider)
    changed = _changed_settings(current, _stored_function(path), _SEEN_IN_TENSORS)
    if not changed:
        return None
    return (
        f"the weights of {path} are of a model that computes something else: {'; '.join(changed)}"
    )


def _stored_function(path: Path) -> dict[str, Any]:
    """Return the settings of the model in a Hugging Face or Megatron directory that change what it computes."""
    if is_hf_model(path):
        # without AutoBridge.to_megatron_provider, whose notes the loading of the weights prints
        pretrained = AutoBridge.from_hf_pretrained(path, adapter="none").hf_pretrained
        return function_of(bridge_for(pretrained.config).provider_bridge(pretrained))
    return _from_run_config(path)


def _changed_settings(
    current: dict[str, Any], before: dict[str, Any], allowed: Collection[str]
) -> list[str]:
    """Return a phrase for each setting of a model whose value differs from the checkpoint's."""
    return [
        f"model.{name} is {_shown_value(value)}, in the checkpoint {_shown_value(before[name])}"
        for name, value in current.items()
        if name in before and name not in allowed and value != before[name]
    ]


def _shown_value(value: Any) -> str:
    """Return a value of plain data as text; a function is shown by its name."""
    return str(value[TARGET]) if isinstance(value, dict) and TARGET in value else repr(value)


def _from_run_config(directory: Path) -> dict[str, Any]:
    if not (directory / paths.RUN_CONFIG).is_file():
        return {}  # Megatron-LM's
    model = model_io.read_run_config(directory)["model"]
    return model if isinstance(model, dict) else {}
