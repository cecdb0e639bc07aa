# SPDX-License-Identifier: Apache-2.0
"""``megatron-bridge from-trainer``: settings of other trainers as settings on top of a recipe."""

import argparse
import json
import math
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from megatron.bridge.cli.migrate.translation import Translation
from megatron.bridge.utils.atomic import read_text
from megatron.bridge.utils.config import yaml_text
from megatron.bridge.utils.errors import UserError, misspelling, refuse


def run(args: argparse.Namespace) -> int:
    values = yaml_text.read(read_text(args.source, str(args.source)), str(args.source))
    if not isinstance(values, dict):
        raise UserError(f"{args.source} holds no settings: give a file with key: value lines")
    found = translate(values, args.ranks)
    text = yaml_text.write(
        {key: yaml_text.read(value) for key, value in found.translation.settings.items()}
    )
    found.translation.show(text, args.output)
    options = [
        word for name, value in found.options.items() for word in (f"--{name}", value) if word
    ]
    file = str(args.output or "FILE")
    words = ["megatron-bridge", "train", "--recipe", args.recipe, "--config", file, *options]
    sys.stderr.write(f"{shlex.join(words)}\n")
    return 0


_TABLES = yaml_text.tables_beside(__file__)
_ALIASES = _TABLES["aliases"]
_TARGETS = [
    (key, f"{group}.{name}")
    for group, pairs in _TABLES["settings"].items()
    for key, name in pairs.items()
]
_SETTINGS = {key: [target for name, target in _TARGETS if name == key] for key, _ in _TARGETS}
_REASONS = {name: reason for reason, names in _TABLES["missing"].items() for name in names}
_BATCH = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
"""Factors of the batch size, with the Trainer's defaults."""


@dataclass
class TrainerRun:
    translation: Translation = field(default_factory=Translation)
    options: dict[str, str] = field(default_factory=dict[str, str])
    """Options of ``megatron-bridge train``, by name; an empty text is a switch."""


def translate(values: Mapping[str, Any], ranks: int) -> TrainerRun:
    """Translate the keys of the file; the Trainer's batch sizes are for one of the data-parallel ``ranks``."""
    given = {_ALIASES.get(key, key): value for key, value in values.items() if value is not None}
    refuse(problem for key in values for problem in _unknown(key))
    if given.get("max_steps", 1) <= 0:  # means "not set" in the Trainer
        del given["max_steps"]
    if "max_steps" in given:  # it overrides the epochs
        given.pop("num_train_epochs", None)
    run = TrainerRun()
    for key, value in given.items():
        _translate(key, value, run)
    if _BATCH.keys() & given.keys():
        size = math.prod(given.get(key, default) for key, default in _BATCH.items()) * ranks
        run.translation.set(
            "train.global_batch_size", size, f"{' x '.join(_BATCH)} x {ranks} ranks"
        )
    return run


def _unknown(key: str) -> list[str]:
    known = [*_SETTINGS, *_ALIASES, *_SPECIAL, *_BATCH, *_TABLES["implied"], *_REASONS]
    if key in known:
        return []
    return [
        f"{key} is not a setting that this command knows{misspelling(key, known) or ': leave it out'}"
    ]


def _translate(key: str, value: Any, run: TrainerRun) -> None:
    found = run.translation
    if value is False or key in _TABLES["implied"]:
        found.implied[key] = (
            "it is off" if value is False else "it is always on here, or not needed"
        )
    elif key in _SPECIAL:
        if (reason := _SPECIAL[key](value, run)) is not None:
            found.missing[key] = reason
    elif key in _REASONS:
        found.missing[key] = _REASONS[key]
    else:
        for target in _SETTINGS.get(key, ()):
            found.set(target, value, key)


def _choose(target: str, known: Mapping[str, str], value: Any, run: TrainerRun) -> str | None:
    """Set ``target``, a key or an option (without a dot), to this package's name of the value."""
    if value not in known:
        return (
            f"{value} has no counterpart: choose one of {', '.join(dict.fromkeys(known.values()))}"
        )
    if "." in target:
        run.translation.set(target, known[value], value)
    elif run.options.get(target) in (None, "sft"):  # an adapter or another loss overrides it
        run.options[target] = known[value]
    return None


def _recompute(value: Any, run: TrainerRun) -> None:
    for name, setting in (("granularity", "full"), ("method", "uniform"), ("num_layers", 1)):
        run.translation.set(f"model.recompute_{name}", setting, "gradient_checkpointing")


def _dataset(value: Any, run: TrainerRun) -> str | None:
    """Set the path of a single dataset, and the format that axolotl's list names."""
    parts: list[Any] = value if isinstance(value, list) else [value]
    if len(parts) != 1 or (isinstance(parts[0], str) and "," in parts[0]):
        return "several datasets are a BlendedDatasetConfig: see docs/finetuning.md"
    entry: Mapping[str, Any] = parts[0] if isinstance(parts[0], Mapping) else {"path": parts[0]}
    run.options["data"] = str(entry.get("path"))
    if "alpaca" in str(entry.get("type", entry.get("path"))):
        run.translation.set("dataset.process_example_fn", "alpaca_example", "dataset")
    return None


def _targets(value: Any, run: TrainerRun) -> str | None:
    names: list[str] = value.replace(",", " ").split() if isinstance(value, str) else value
    if unknown := [name for name in names if name not in _TABLES["modules"]]:
        return f"{', '.join(unknown)}: all linear layers are the default; peft.target_modules takes Megatron's names"
    modules = list(dict.fromkeys(_TABLES["modules"][name] for name in names))
    run.translation.set("peft.target_modules", json.dumps(modules), "lora_target")
    return None


_SPECIAL: dict[str, Callable[[Any, TrainerRun], str | None]] = {
    "lr_scheduler_type": partial(_choose, "scheduler.lr_decay_style", _TABLES["schedules"]),
    "optim": partial(_choose, "optimizer.optimizer", _TABLES["optimizers"]),
    "stage": partial(_choose, "mode", _TABLES["modes"]),
    "finetuning_type": partial(_choose, "mode", _TABLES["modes"]),
    "bf16": lambda value, run: run.translation.set("mixed_precision", "bf16_mixed", "bf16"),
    "fp16": lambda value, run: run.translation.set("mixed_precision", "fp16_mixed", "fp16"),
    "gradient_checkpointing": _recompute,
    "packing": lambda value, run: run.options.update(packed_sequence=""),
    "model_name_or_path": lambda value, run: run.options.update({"hf-model": str(value)}),
    "dataset": _dataset,
    "lora_target": _targets,
    "lora_target_linear": lambda value, run: _targets("all-linear", run),
}
"""Functions for keys that need code; each returns the reason if the value has no counterpart."""
