# SPDX-License-Identifier: Apache-2.0
"""``megatron-bridge train``: run a recipe, with overrides, on this machine or under torchrun."""

import argparse
import os
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

EXAMPLES = """examples:
  megatron-bridge train --list llama pretrain
  megatron-bridge train --recipe llama32_1b_pretrain_config --dry-run model.tensor_model_parallel_size=2
  torchrun --nproc-per-node=8 -m megatron.bridge.cli.main train --recipe llama32_1b_pretrain_config \\
      --data corpus/text checkpoint.save=runs/llama train.train_iters=5000
"""

ADAPTERS = ("lora", "dora")
MODES = ("pretrain", "sft", *ADAPTERS)


_OVERRIDE = re.compile(r"[A-Za-z_]\w*(\.\w+)+=")


@dataclass
class Job:
    """A config that is ready to run.

    Attributes:
        config: All settings, resolved only in part.
        source: Where it came from, for people.
        mode: ``pretrain`` or ``sft``.
        world_size: Processes that it was made for, where known.
        changes: What files and the command line set.
    """

    config: "ConfigContainer"
    source: str
    mode: str
    world_size: int | None
    changes: "list[Change]" = field(default_factory=list)


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add ``train``."""
    parser = subparsers.add_parser(
        "train",
        help="pretrain or fine-tune a model from a recipe",
        description="Pretrain or fine-tune a model from a recipe.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_job_options(parser)
    parser.add_argument(
        "--list", nargs="*", metavar="WORD", help="show the recipes that contain all words, and end"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the resolved config and what it means, and end"
    )
    parser.add_argument("--world-size", type=int, metavar="N", help="processes to assume in a dry run")


def add_job_options(parser: argparse.ArgumentParser) -> None:
    """Add what says which job to run; the rest of the options say what to do with it."""
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="settings to change, in YAML")
    parser.add_argument("--recipe", metavar="NAME", help="recipe to run; --list shows all")
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="YAML file: settings on top of --recipe, or a whole config"
    )
    parser.add_argument(
        "--data", nargs="+", metavar="PATH", help="corpora to pretrain on, or the folder to tune on"
    )
    parser.add_argument("--mode", choices=MODES, help="what to do (default: as the recipe's name says)")
    parser.add_argument(
        "--step_func", default="gpt_step", metavar="NAME", help="gpt_step, or package.module.function of your own"
    )
    parser.add_argument("--seq_length", type=int, metavar="N", help="tokens of a sample, for data and model")
    parser.add_argument("--peft_scheme", metavar="NAME", help="adapter to train, lora or dora, like --mode")
    parser.add_argument(
        "--packed_sequence", action="store_true", help="pack several samples of a fine-tuning set into one row"
    )


def run(args: argparse.Namespace) -> int:
    """List, show, or train."""
    if args.list is not None:
        return _list(args)
    _check_options(args)
    job = prepare(args)
    if args.dry_run:
        return _dry_run(job, args)
    return _train(job, args)


def prepare(args: argparse.Namespace) -> Job:
    """The config that the arguments ask for.

    Raises:
        UserError: a name, a file, a key or a value is wrong.
    """
    from megatron.bridge.utils.config import origins
    from megatron.bridge.utils.config.overrides import apply_overrides

    overrides = [*args.overrides, *_overrides_behind_data(args)]
    job = _start(args)
    if args.seq_length is not None:
        overrides += [f"{group}.seq_length={args.seq_length}" for group in ("dataset", "model")]
    job.changes += apply_overrides(job.config, overrides)
    if args.packed_sequence:
        job.changes += _pack(job)
    origins.record(job.config, job.changes)
    job.mode = args.mode or job.mode
    _check_mode(job)
    return job


def _pack(job: Job) -> "list[Change]":
    """Rows as long as the model's, each of several samples."""
    from megatron.bridge.data.config import PackedSequenceSpecs, SFTDatasetConfig
    from megatron.bridge.utils.config.overrides import Change

    dataset: Any = job.config.dataset
    if not isinstance(dataset, SFTDatasetConfig):
        raise UserError(
            f"--packed_sequence packs samples to fine-tune on, the data of {job.source} is a "
            f"{type(dataset).__name__}: use a finetune recipe, or leave it out"
        )
    old, new = dataset.packed_sequence_specs, PackedSequenceSpecs(packed_sequence_size=dataset.seq_length)
    dataset.packed_sequence_specs = new
    return [Change("dataset.packed_sequence_specs", old, new, "command line")]


def _overrides_behind_data(args: argparse.Namespace) -> list[str]:
    """Take from ``--data``, which takes all words up to the next option, those that are ``key.sub=value``."""
    words = args.data or []
    overrides = [word for word in words if _OVERRIDE.match(word)]
    if args.data is not None:
        args.data = [word for word in words if word not in overrides]
    return overrides


def _check_mode(job: Job) -> None:
    if job.mode in ADAPTERS and job.config.peft is None:
        raise UserError(f"--mode {job.mode}, but {job.source} has no peft: set it there, or leave --mode out")


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

    extra = [name for name in ("recipe", "data", "peft_scheme") if getattr(args, name) is not None]
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
    if options:
        before = origins.values(config)
        config = recipe.build(**options)
        origins.start(config)
        origins.mark_given(config, before, "command line")
    else:
        origins.start(config)
    return Job(config, recipe.name, recipe.mode, recipe.gpus)


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


def _check_options(args: argparse.Namespace) -> None:
    if args.world_size is not None and not args.dry_run:
        raise UserError("--world-size is for --dry-run; torchrun --nproc-per-node starts that many processes")


def _list(args: argparse.Namespace) -> int:
    from megatron.bridge.recipes.catalog import search

    words = " ".join([*args.list, *args.overrides])
    rows = [
        (recipe.name, recipe.mode, f"{recipe.gpus} x {recipe.gpu_kind}", recipe.what) for recipe in search(words)
    ]
    if not rows:
        raise UserError(f"no recipe contains {words!r}; --list alone shows all of them")
    table = [("RECIPE", "MODE", "GPUS", "TRAINS"), *rows]
    widths = [max(len(row[column]) for row in table) for column in range(3)]
    for row in table:
        cells = [cell.ljust(width) for cell, width in zip(row[:3], widths, strict=True)]
        _print("  ".join([*cells, row[3]]) + "\n")
    return 0


def _print(text: str) -> None:
    """Write to standard output, once for all ranks."""
    if os.environ.get("RANK", "0") == "0":
        sys.stdout.write(text)


def _dry_run(job: Job, args: argparse.Namespace) -> int:
    """Print YAML that --config reads again, and last, where a terminal shows it, the summary as comments."""
    from megatron.bridge.cli.summary import describe, warnings
    from megatron.bridge.utils.config import origins
    from megatron.bridge.utils.config.overrides import check_sticks

    given = args.world_size or int(os.environ.get("WORLD_SIZE", "0"))
    world_size = given or job.world_size or 1
    before = origins.values(job.config)
    notes = job.config.validate(world_size)
    origins.mark_derived(job.config, before)
    check_sticks(job.config, job.changes)
    lines = [f"{job.mode} from {job.source}", *describe(job.config, world_size)]
    if not given:
        lines.append(f"(for {world_size} processes; --world-size N assumes another number)")
    lines += [f"note: {note}" for note in [*notes, *warnings(job.config)]]
    _print(origins.annotated_yaml(job.config) + "".join(f"# {line}\n" for line in lines))
    return 0


def _train(job: Job, args: argparse.Namespace) -> int:
    import copy

    from megatron.core import parallel_state
    from torch import distributed

    from megatron.bridge.cli.summary import describe, warnings
    from megatron.bridge.training.finetune import finetune
    from megatron.bridge.training.pretrain import pretrain
    from megatron.bridge.utils import dist
    from megatron.bridge.utils.config.overrides import check_sticks
    from megatron.bridge.utils.console import console

    step = _forward_step(args.step_func)
    resolved = copy.deepcopy(job.config)  # the run resolves its own, and tells what it replaced
    resolved.validate()
    check_sticks(resolved, job.changes)
    for line in [*describe(resolved, dist.world_size()), *(f"note: {line}" for line in warnings(resolved))]:
        console().print(line, markup=False)
    (pretrain if job.mode == "pretrain" else finetune)(job.config, step)
    parallel_state.destroy_model_parallel()
    distributed.destroy_process_group()
    return 0


def _forward_step(name: str) -> Any:
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
