# SPDX-License-Identifier: Apache-2.0
"""From the arguments of ``train`` to a config that is ready to run."""

import argparse
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.bridge.utils.errors import UserError

if TYPE_CHECKING:
    from megatron.bridge.recipes.catalog import Recipe
    from megatron.bridge.training.config import ConfigContainer
    from megatron.bridge.utils.config.overrides import Change

ADAPTERS = ("lora", "dora")
TAUGHT = ("distill", "cache-teacher")
MODES = ("pretrain", "sft", *ADAPTERS, *TAUGHT)


_OVERRIDE = re.compile(r"[A-Za-z_]\w*(\.\w+)*=")


@dataclass
class Job:
    """A config that is ready to run.

    Attributes:
        config: All settings, resolved only in part.
        source: Where it came from, for people.
        mode: One of ``MODES``.
        world_size: Processes that it was made for, where known.
        recipe: The recipe, if there is one.
        changes: What files and the command line set.
    """

    config: "ConfigContainer"
    source: str
    mode: str
    world_size: int | None
    recipe: "Recipe | None" = None
    changes: "list[Change]" = field(default_factory=list)

    @property
    def gpu_kind(self) -> str:
        """The GPUs that it was made for; empty where not known."""
        return "" if self.recipe is None else self.recipe.gpu_kind


def prepare(args: argparse.Namespace) -> Job:
    """The config that the arguments ask for.

    Raises:
        UserError: a name, a file, a key or a value is wrong.
    """
    from megatron.bridge.utils.config import origins
    from megatron.bridge.utils.config.overrides import apply_overrides

    overrides = [*args.overrides, *_overrides_behind_data(args)]
    job = _start(args)
    if args.mode in TAUGHT:
        _give_teacher(job)
    if args.seq_length is not None:
        overrides += [f"{group}.seq_length={args.seq_length}" for group in ("dataset", "model")]
    job.changes += apply_overrides(job.config, overrides)
    if args.packed_sequence:
        job.changes += _pack(job)
    origins.record(job.config, job.changes)
    job.mode = args.mode or ("distill" if job.config.distill else job.mode)
    _check_mode(job, args)
    return job


def _give_teacher(job: Job) -> None:
    """Any recipe can train a student: ``distill.teacher`` and its neighbours become keys to set."""
    from megatron.bridge.training.config import DistillConfig

    if job.config.distill is None:
        job.config.distill = DistillConfig()


def _pack(job: Job) -> "list[Change]":
    """Rows as long as the model's, each of several samples and therefore alone, unless a batch was asked for."""
    from megatron.bridge.data.config import PackedSequenceSpecs, SFTDatasetConfig
    from megatron.bridge.utils.config.overrides import Change

    dataset: Any = job.config.dataset
    if not isinstance(dataset, SFTDatasetConfig):
        raise UserError(
            f"--packed_sequence packs samples to fine-tune on, the data of {job.source} is a "
            f"{type(dataset).__name__}: use a finetune recipe, or leave it out"
        )
    specs = dataset.packed_sequence_specs or PackedSequenceSpecs()
    old, specs.packed_sequence_size = specs.packed_sequence_size, dataset.seq_length
    dataset.packed_sequence_specs = specs
    # the size alone: what else the specs hold is filled in later
    key = "dataset.packed_sequence_specs.packed_sequence_size"
    changes = [Change(key, old, dataset.seq_length, "command line")]
    train = job.config.train
    if train.micro_batch_size > 1 and "train.micro_batch_size" not in {change.key for change in job.changes}:
        changes.append(Change("train.micro_batch_size", train.micro_batch_size, 1, "command line"))
        train.micro_batch_size = 1
    return changes


def _overrides_behind_data(args: argparse.Namespace) -> list[str]:
    """Take from ``--data``, which takes all words up to the next option, those that are ``key=value``."""
    words = args.data or []
    overrides = [word for word in words if _OVERRIDE.match(word) and not _is_data(word)]
    if args.data is not None:
        args.data = [word for word in words if word not in overrides]
    return overrides


def _is_data(word: str) -> bool:
    return Path(word).exists() or Path(f"{word}.idx").exists()


def _check_mode(job: Job, args: argparse.Namespace) -> None:
    if job.mode in TAUGHT and args.step_func != "gpt_step":
        raise UserError(
            f"--step_func {args.step_func} with --mode {job.mode}, which has a step of its own: leave one out"
        )
    peft = type(job.config.peft).__name__
    if job.mode in ADAPTERS and not peft.lower().endswith(job.mode):  # CanonicalLoRA is a LoRA
        found = "no peft" if job.config.peft is None else f"peft={peft}"
        raise UserError(f"--mode {job.mode}, but {job.source} has {found}: set another there, or leave --mode out")


def _start(args: argparse.Namespace) -> Job:
    """The recipe, or the file, without what the command line changes."""
    values = _read_config(args.config) if args.config else None
    if values is not None and "_target_" in values:
        return _from_whole_file(args, values)
    if args.recipe is None:
        reason = f"{args.config} is not a whole config" if args.config else "there is nothing to run"
        raise UserError(f"{reason}: give --recipe NAME (--list shows the names)")
    from megatron.bridge.recipes.catalog import find

    job = _from_recipe(find(args.recipe), args)
    if values:
        from megatron.bridge.utils.config.overrides import apply_values

        job.changes += apply_values(job.config, values, f"file {args.config}")
    return job


def _read_config(path: Path) -> dict[str, Any]:
    from megatron.bridge.utils.config import yaml_text

    try:
        values = yaml_text.read(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UserError(f"--config {path} cannot be read: {reason}") from error
    if not isinstance(values, dict):
        raise UserError(f"--config {path} holds no settings: write key: value lines, as --dry-run prints them")
    return values


def _from_whole_file(args: argparse.Namespace, values: dict[str, Any]) -> Job:
    from megatron.bridge.training.config import ConfigContainer
    from megatron.bridge.utils.config import origins
    from megatron.bridge.utils.config.overrides import check_types
    from megatron.bridge.utils.config.serialize import from_plain

    of_recipes = {"hf-model": args.hf_model, "data": args.data, "peft_scheme": args.peft_scheme}
    extra = [name for name, value in {"recipe": args.recipe, **of_recipes}.items() if value is not None]
    if extra:
        raise UserError(f"--{extra[0]} does not go with {args.config}, which is a whole config: leave one out")
    config = from_plain(values)
    if not isinstance(config, ConfigContainer):
        raise UserError(f"{args.config} describes a {type(config).__name__}, not a run: its top must be {_top()}")
    check_types(config)
    origins.start(config, f"file {args.config}")
    mode = "pretrain" if config.checkpoint.pretrained_checkpoint is None else "sft"
    return Job(config, str(args.config), mode, None)


def _top() -> str:
    return "_target_: megatron.bridge.training.config.ConfigContainer"


def _from_recipe(recipe: "Recipe", args: argparse.Namespace) -> Job:
    from megatron.bridge.utils.config import origins

    config = recipe.build()
    options = _data_option(recipe, args.data) | _adapter_option(recipe, args)
    if args.hf_model is not None:
        options["hf_model"] = args.hf_model
    if options:
        before = origins.values(config)
        config = recipe.build(**options)
        origins.start(config)
        origins.mark_given(config, before, "command line")
    else:
        origins.start(config)
    return Job(config, recipe.name, recipe.mode, recipe.gpus, recipe)


def _adapter_option(recipe: "Recipe", args: argparse.Namespace) -> dict[str, Any]:
    """``--peft_scheme``, or ``--mode`` where it says the same."""
    mode = args.mode if args.mode in ADAPTERS else None
    scheme = args.peft_scheme or mode
    if scheme is None:
        return {}
    if args.mode is not None and args.mode not in (scheme, "sft"):
        raise UserError(f"--mode {args.mode} and --peft_scheme {scheme} contradict each other: leave one out")
    if recipe.mode == "pretrain":
        raise UserError(f"{recipe.name} trains all weights from random ones: adapters need a finetune recipe")
    return {"peft": scheme}


def _data_option(recipe: "Recipe", paths: list[str] | None) -> dict[str, Any]:
    if paths is None:
        return {}
    if recipe.mode == "pretrain":
        return {"data_paths": paths}
    if len(paths) > 1:
        raise UserError(f"--data {' '.join(paths)}: fine-tuning reads one folder, the one with training.jsonl")
    return {"dataset_root": paths[0]}


def forward_step(name: str) -> Any:
    """The function that ``--step_func`` names.

    Raises:
        UserError: there is none.
    """
    from megatron.bridge.utils.config.names import locate

    if "." not in name:
        if name != "gpt_step":
            raise UserError(f"--step_func {name} is not known: choose gpt_step, or give package.module.function")
        name = "megatron.bridge.training.gpt_step.forward_step"
    sys.path.insert(0, str(Path.cwd()))  # a module that lies where the command was typed
    try:
        step = locate(name)
    except UserError as error:
        raise UserError(f"--step_func {name}: {error}") from error
    if not callable(step):
        raise UserError(f"--step_func {name} is not a function")
    return step
