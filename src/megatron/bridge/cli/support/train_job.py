# SPDX-License-Identifier: Apache-2.0
"""Build the config of a run from the arguments of ``train``."""

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.bridge.cli.support.model_sizes import follow_sizes
from megatron.bridge.models.hf_pretrained import hub
from megatron.bridge.recipes import builders
from megatron.bridge.recipes.catalog import find
from megatron.bridge.recipes.options import (
    DPO_ADAPTER_DEFAULTS,
    DPO_DEFAULTS,
    GRPO_ADAPTER_DEFAULTS,
    GRPO_DEFAULTS,
)
from megatron.bridge.recipes.recipe import Recipe
from megatron.bridge.recipes.sizes import CheckpointSize
from megatron.bridge.training.config.early import check_early
from megatron.bridge.utils.atomic import read_text
from megatron.bridge.utils.config import yaml_text
from megatron.bridge.utils.config.interpolation import references_in, resolve_tree
from megatron.bridge.utils.config.keys import leaf_values
from megatron.bridge.utils.config.names import TARGET, importing, locate
from megatron.bridge.utils.config.origins import Origins
from megatron.bridge.utils.config.overrides import (
    Change,
    Layer,
    apply_layers,
    check_sticks,
    settle_types,
)
from megatron.bridge.utils.config.serialize import from_plain
from megatron.bridge.utils.errors import UserError

if TYPE_CHECKING:
    from megatron.bridge.training.config import ConfigContainer, Resolved

ADAPTERS = ("lora", "dora", "qlora")
DISTILL_MODES = ("distill", "cache-teacher")
OWN_STEP = (*DISTILL_MODES, "dpo", "grpo")  # modes with a forward step of their own

_OVERRIDE = re.compile(r"[A-Za-z_]\w*(\.\w+|\[\w+\])*=")


@dataclass
class TrainJob:
    """The job that the arguments of a command describe."""

    config: "ConfigContainer"  # all settings, not resolved yet
    origins: Origins
    source: str  # the recipe or the file, for messages
    mode: str  # one of the choices of ``--mode``
    world_size: int | None  # number of processes for which the recipe was made, if known
    recipe: Recipe | None = None
    changes: list[Change] = field(
        default_factory=list
    )  # settings from files and from the command line
    notes: list[str] = field(default_factory=list)
    """Sentences for the user, shown with those of the resolved config."""

    @property
    def gpu_kind(self) -> str:
        """The GPU for which the recipe was made; empty if unknown."""
        return "" if self.recipe is None else self.recipe.gpu_kind

    def resolve(
        self, world_size: int, count_rows: Callable[[Any], int] | None = None
    ) -> "Resolved[ConfigContainer]":
        """``ConfigContainer.resolve`` for ``world_size`` processes, not necessarily on this machine."""
        resolved = self.config.resolve(world_size, self.origins, count_rows)
        check_sticks(resolved.config, self.changes)
        resolved.notes.extend(self.notes)
        return resolved


def is_override(word: str) -> bool:
    """Return whether a word of the command line sets a key, as in ``train.train_iters=5``."""
    return _OVERRIDE.match(word) is not None


def prepare(args: argparse.Namespace) -> TrainJob:
    with importing(args.trust_config):
        job = _configured(args)
    job.changes += _follow_checkpoint(job)
    followed, job.notes = follow_sizes(job.config.model, job.changes)
    job.changes += followed
    job.changes += _read_text(job, args)
    if args.packed_sequence:
        job.changes += _pack(job)
    job.origins.record(job.config, job.changes)
    _check_code_of_file(job, args)
    _check_length(job)
    objectives = ("distill", "dpo", "grpo")
    of_config = [name for name in objectives if getattr(job.config, name) is not None]
    job.mode = args.mode or next(iter(of_config), job.mode)
    _check_mode(job, args)
    return job


def _configured(args: argparse.Namespace) -> TrainJob:
    """The config of the recipe or file, with everything that was set on it."""
    overrides = [*args.overrides, *_overrides_after_data(args)]
    values = _read_config(args.config) if args.config else {}
    is_whole = TARGET in values
    # references of a complete config are resolved again after overrides, which they may name
    of_file = references_in(values) if is_whole else values
    layers = [Layer(f"file {args.config}", of_file)] if of_file else []
    check_early([*layers, Layer("command line", overrides=overrides)])
    job = _from_whole_file(args, values, layers) if is_whole else _start(args)
    if args.mode in DISTILL_MODES and job.config.distill is None:
        from megatron.bridge.training.config import DistillConfig

        job.config.distill = (
            DistillConfig()
        )  # so that the keys of any recipe include ``distill.teacher``
    if args.seq_length is not None:
        overrides += [f"{group}.seq_length={args.seq_length}" for group in ("dataset", "model")]
    if "peft" not in values:
        _check_adapters(job, overrides)
    job.changes += apply_layers(job.config, [*layers, Layer("command line", overrides=overrides)])
    return job


def _read_text(job: TrainJob, args: argparse.Namespace) -> list[Change]:
    """Give records of a file of settings the model's tokenizer: that of a recipe without data reads only numbers."""
    from megatron.bridge.training.config import TokenizerConfig

    tokenizer = job.config.tokenizer
    is_mock = tokenizer.tokenizer_type == "NullTokenizer"
    has_data = any(change.key == "dataset" for change in job.changes)
    is_chosen = any(change.key.startswith("tokenizer") for change in job.changes)
    if job.recipe is None or not is_mock or not has_data or is_chosen:
        return []
    size = job.recipe.size
    name = args.hf_model or (size if isinstance(size, str) else size.hub_id)
    job.config.tokenizer = TokenizerConfig(
        tokenizer_type="HuggingFaceTokenizer", tokenizer_model=name
    )
    return [Change("tokenizer", tokenizer, job.config.tokenizer, "from the model of the recipe")]


def _check_code_of_file(job: TrainJob, args: argparse.Namespace) -> None:
    """Ask before code is run that a file names; names on the command line are the user's own."""
    settings = job.config.grpo
    if settings is None or args.trust_config:
        return
    for name in ("reward_funcs", "tools"):
        functions = getattr(settings, name)
        origin = job.origins.get(f"grpo.{name}") or ""
        if functions and origin.startswith("file"):
            raise UserError(
                f"grpo.{name}={functions} of {args.config} runs code: if you trust the file, give --trust-config, "
                "or name the functions on the command line"
            )


def _check_adapters(job: TrainJob, overrides: Sequence[str]) -> None:
    """Refuse settings of adapters in a run without them."""
    values = {key: value for key, _, value in (word.partition("=") for word in overrides)}
    members = [key for key in values if key.startswith("peft.")]
    if job.config.peft is None and members and "peft" not in values:
        raise UserError(
            f"{members[0]} needs adapters, which {job.source} does not have: add --peft-scheme lora, "
            "dora or qlora"
        )
    if values.get("peft") in ADAPTERS:
        raise UserError(f"peft={values['peft']} is an option: write --peft-scheme {values['peft']}")


def _follow_checkpoint(job: TrainJob) -> list[Change]:
    """Use the tokenizer of the weights that the user chose, unless the user chose a tokenizer, too."""
    from megatron.bridge.models.conversion.pretrained import tokenizer_of

    tokenizer = job.config.tokenizer
    weights = job.config.checkpoint.pretrained_checkpoint
    chosen = {change.key for change in job.changes}
    follows = (
        "checkpoint.pretrained_checkpoint" in chosen and "tokenizer.tokenizer_model" not in chosen
    )
    if not follows or weights is None or tokenizer.tokenizer_type != "HuggingFaceTokenizer":
        return []
    old = tokenizer.tokenizer_model
    weights_tokenizer = tokenizer_of(weights)
    if weights_tokenizer in (None, old):
        return []
    tokenizer.tokenizer_model = weights_tokenizer
    return [
        Change(
            "tokenizer.tokenizer_model", old, weights_tokenizer, "checkpoint.pretrained_checkpoint"
        )
    ]


def _pack(job: TrainJob) -> list[Change]:
    """Pack samples into rows of ``seq_length`` tokens, with micro-batch size 1 unless the user set another."""
    from megatron.bridge.data.config import PackedSequenceSpecs, SFTDatasetConfig

    dataset: Any = job.config.dataset
    if not isinstance(dataset, SFTDatasetConfig):
        raise UserError(
            f"--packed-sequence packs fine-tuning data, but the data of {job.source} is a "
            f"{type(dataset).__name__}: use a finetune recipe, or leave it out"
        )
    specs = dataset.packed_sequence_specs or PackedSequenceSpecs()
    old = specs.packed_sequence_size
    specs.packed_sequence_size = dataset.seq_length
    dataset.packed_sequence_specs = specs
    # the size alone: the other specs are derived later
    key = "dataset.packed_sequence_specs.packed_sequence_size"
    changes = [Change(key, old, dataset.seq_length, "command line")]
    train = job.config.train
    if train.micro_batch_size > 1 and "train.micro_batch_size" not in {
        change.key for change in job.changes
    }:
        changes.append(Change("train.micro_batch_size", train.micro_batch_size, 1, "command line"))
        train.micro_batch_size = 1
    return changes


def _overrides_after_data(args: argparse.Namespace) -> list[str]:
    """Move ``key=value`` words from ``--data``, which takes all words up to the next option, to the overrides."""
    words = args.data or []
    overrides = [
        word
        for word in words
        if is_override(word) and not (Path(word).exists() or Path(f"{word}.idx").exists())
    ]
    if args.data is not None:
        args.data = [word for word in words if word not in overrides]
    return overrides


def _check_length(job: TrainJob) -> None:
    """Refuse steps together with epochs; epochs override the steps of a recipe."""
    train = job.config.train
    if train.num_epochs is not None and "train.train_iters" in {
        change.key for change in job.changes
    }:
        raise UserError(
            f"train.num_epochs={train.num_epochs:g} and train.train_iters={train.train_iters} exclude each other: "
            "remove train.train_iters, or set train.num_epochs=null"
        )


def _check_mode(job: TrainJob, args: argparse.Namespace) -> None:
    if job.mode in OWN_STEP and args.step_func not in (None, "gpt_step"):
        raise UserError(
            f"--step-func {args.step_func} cannot be used with --mode {job.mode}, which has its own forward step: "
            "leave one out"
        )
    if job.mode in ("dpo", "grpo") and getattr(job.config, job.mode) is None:
        raise UserError(
            f"--mode {job.mode}, but {job.source} has no {job.mode}: use a recipe for fine-tuning, or leave --mode out"
        )
    peft = type(job.config.peft).__name__
    if job.mode == "qlora" and getattr(job.config.peft, "base_precision", None) is None:
        raise UserError(
            f"--mode qlora, but {job.source} has no peft.base_precision: set it, or use --mode lora"
        )
    method = "lora" if job.mode == "qlora" else job.mode
    if job.mode in ADAPTERS and not peft.lower().endswith(method):  # CanonicalLoRA is a LoRA
        peft_phrase = "no peft" if job.config.peft is None else f"peft={peft}"
        raise UserError(
            f"--mode {job.mode}, but {job.source} has {peft_phrase}: change its peft, or leave --mode out"
        )


def _start(args: argparse.Namespace) -> TrainJob:
    if args.hf_model is not None:
        hub.local_folder(args.hf_model)  # before anything slow is imported
    if args.recipe is None and args.hf_model is not None and args.model_alone:
        return _from_model(args)
    if args.recipe is None:
        reason = (
            f"{args.config} is not a complete config" if args.config else "there is nothing to run"
        )
        raise UserError(
            f"{reason}: give --recipe NAME (`megatron-bridge train --list` shows the names)"
        )
    return _from_recipe(find(args.recipe), args)


def _read_config(path: Path) -> dict[str, Any]:
    values = yaml_text.read(read_text(path, f"--config {path}"), str(path))
    if not isinstance(values, dict):
        raise UserError(
            f"--config {path} holds no settings: write key: value lines, as --dry-run prints them"
        )
    return values


def _from_whole_file(
    args: argparse.Namespace, values: dict[str, Any], references: list[Layer]
) -> TrainJob:
    of_recipes = {"hf-model": args.hf_model, "data": args.data, "peft-scheme": args.peft_scheme}
    extra = [
        name for name, value in {"recipe": args.recipe, **of_recipes}.items() if value is not None
    ]
    if extra:
        raise UserError(
            f"--{extra[0]} cannot be used with {args.config}, a complete config: leave one out"
        )
    from megatron.bridge.training.config import ConfigContainer

    config = from_plain(resolve_tree(values))
    if not isinstance(config, ConfigContainer):
        raise UserError(
            f"{args.config} describes a {type(config).__name__}, not a run: its top must be _target_: ConfigContainer"
        )
    apply_layers(config, references)
    settle_types(config)
    mode = "pretrain" if config.checkpoint.pretrained_checkpoint is None else "sft"
    return TrainJob(config, Origins.of(config, f"file {args.config}"), str(args.config), mode, None)


def _from_recipe(recipe: Recipe, args: argparse.Namespace) -> TrainJob:
    options = _data_option(recipe, args.data) | _adapter_option(recipe, args)
    if args.hf_model is not None:
        options["hf_model"] = args.hf_model
    becomes = args.mode if recipe.stage == "sft" else None
    if becomes in ("dpo", "grpo"):
        options = _objective_options(becomes, options.get("peft") is not None) | options
    config = recipe(**options)
    if becomes == "dpo":
        root = options.get("dataset_root") or "preferences"
        builders.train_on_preferences(config, str(root), config.rng.seed)
    if becomes == "grpo":
        root = options.get("dataset_root") or "prompts"
        builders.train_on_rewards(config, str(root), config.rng.seed)
    origins = Origins.of(config)
    if options:
        origins.record_given(config, leaf_values(recipe()), "command line")
    return TrainJob(config, origins, recipe.name, recipe.mode, recipe.gpus, recipe)


def _objective_options(mode: str, has_adapters: bool) -> dict[str, Any]:
    """Return learning rate, warmup and evaluation of ``--mode dpo`` or ``grpo`` for a recipe of fine-tuning."""
    values = {**(DPO_DEFAULTS if mode == "dpo" else GRPO_DEFAULTS)}
    if has_adapters:
        values.update(DPO_ADAPTER_DEFAULTS if mode == "dpo" else GRPO_ADAPTER_DEFAULTS)
    names = ("lr", "warmup_fraction", "eval_iters")
    return {name: values[name] for name in names if name in values}


def _from_model(args: argparse.Namespace) -> TrainJob:
    """Pretraining of any model in the layout of one process, for commands that only measure or predict."""
    size = CheckpointSize(args.hf_model, numbers={}, published=False)
    config = builders.pretrain(
        size, {"hf_model": args.hf_model, "seq_length": args.seq_length or 4096, "lr": 3e-4}
    )
    return TrainJob(config, Origins.of(config), args.hf_model, "pretrain", None)


def _adapter_option(recipe: Recipe, args: argparse.Namespace) -> dict[str, Any]:
    mode = args.mode if args.mode in ADAPTERS else None
    scheme = args.peft_scheme or mode
    if scheme is None:
        return {}
    if args.mode is not None and args.mode not in (scheme, "sft", "dpo", "grpo"):
        raise UserError(
            f"--mode {args.mode} and --peft-scheme {scheme} contradict each other: leave one out"
        )
    if recipe.mode == "pretrain":
        raise UserError(
            f"{recipe.name} trains from random weights: use a finetune recipe for adapters"
        )
    return {"peft": scheme}


def _data_option(recipe: Recipe, paths: list[str] | None) -> dict[str, Any]:
    if paths is None:
        return {}
    if recipe.mode == "pretrain":
        return {"data_paths": paths}
    if len(paths) > 1:
        raise UserError(
            f"--data {' '.join(paths)}: fine-tuning reads one folder or file; give the one with training.jsonl"
        )
    return {"dataset_root": paths[0]}


STEPS = ("gpt_step", "vlm_step", "head_step")


def forward_step(name: str | None, config: "ConfigContainer") -> Any:
    """The function that ``--step-func`` names; None stands for the one that the model needs."""
    has_tower = getattr(config.model, "vision", None) is not None
    if name is None:
        name = "head_step" if config.model.head else STEPS[has_tower]
    if name == "vlm_step" and not has_tower:
        raise UserError("--step-func vlm_step, and the model has no vision tower: leave it out")
    return step_function(name)


def step_function(name: str) -> Any:
    """Import one of ``STEPS``, or ``package.module.function``."""
    if "." not in name:
        if name not in STEPS:
            raise UserError(
                f"--step-func {name} does not exist: use {', '.join(STEPS)} or package.module.function"
            )
        name = f"megatron.bridge.training.{name}.forward_step"
    sys.path.insert(0, str(Path.cwd()))  # also find modules in the current directory
    try:
        with importing():
            step = locate(name)
    except UserError as error:
        raise UserError(f"--step-func {name}: {error}") from error
    from megatron.bridge.training.step.forward_step import takes_state

    if not callable(step):
        raise UserError(f"--step-func {name} is not a function")
    takes_state(step)  # refuses what is no forward step
    return step
