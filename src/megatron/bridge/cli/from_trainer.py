# SPDX-License-Identifier: Apache-2.0
"""``megatron-bridge from-trainer``: settings of other trainers as settings on top of a recipe.

A file says only what differs from its framework's defaults, and a recipe has defaults of its own. So the defaults of
the framework that decide what a model learns are settings, too.
"""

import argparse
import json
import math
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, get_args

from megatron.bridge.cli.migrate.trainer_defaults import (
    AXOLOTL,
    FRAMEWORKS,
    LLAMA_FACTORY,
    TRL_GKD,
    TRL_GRPO,
    Framework,
    framework_of,
    to_number,
    wrong_values,
)
from megatron.bridge.cli.migrate.translation import Translation
from megatron.bridge.cli.support.output_files import YamlFile
from megatron.bridge.cli.support.parser import Parser, count
from megatron.bridge.training.config.blocks.reinforcement import PolicyLossType, RewardScale
from megatron.bridge.training.config.ranges import EARLY_RANGES
from megatron.bridge.utils.atomic import read_text
from megatron.bridge.utils.config import yaml_text
from megatron.bridge.utils.errors import UserError, misspelling, refuse

DESCRIPTION = (
    "Translate a YAML or JSON file of TrainingArguments, TRL, axolotl or LLaMA-Factory to "
    "settings for `train --recipe NAME --config`. Each key is listed with the setting that it "
    "becomes, or with the reason why it has no counterpart. Where the file is silent, the "
    "defaults of its framework are set. The last line is the command to run."
)
EXAMPLES = """example:
  megatron-bridge from-trainer axolotl.yaml --recipe llama32_1b_finetune_config --output settings.yaml
"""


def add_arguments(parser: Parser) -> None:
    parser.description = DESCRIPTION
    parser.epilog = EXAMPLES
    parser.add_argument(
        "source", type=Path, metavar="FILE", help="YAML or JSON file of the other trainer"
    )
    parser.add_argument(
        "--recipe",
        metavar="NAME",
        default="RECIPE",
        help="recipe for the command that is printed",
    )
    parser.add_argument(
        "--output", type=YamlFile, metavar="FILE", help="YAML file to write (default: print it)"
    )
    parser.add_argument(
        "--ranks",
        type=count,
        default=1,
        metavar="N",
        help="data-parallel ranks, for the batch size (default: 1)",
    )
    parser.add_argument(
        "--framework",
        choices=list(FRAMEWORKS),
        help=(
            "the framework of the file, whose defaults are used for missing keys (default: "
            "detected by the keys)"
        ),
    )


def run(args: argparse.Namespace) -> int:
    values = yaml_text.read(read_text(args.source, str(args.source)), str(args.source))
    if not isinstance(values, dict):
        raise UserError(f"{args.source} holds no settings: give a file with key: value lines")
    framework = None if args.framework is None else FRAMEWORKS[args.framework]
    translated = translate(values, args.ranks, framework)
    text = yaml_text.write(
        {key: yaml_text.read(value) for key, value in translated.translation.settings.items()}
    )
    translated.translation.show("from-trainer", text, args.output)
    sys.stderr.write(
        f"read as a file of {translated.framework.name}, whose defaults are used for missing keys "
        "(--framework selects another one)\n"
    )
    options = [
        word for name, value in translated.options.items() for word in (f"--{name}", value) if word
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
_SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
}
_OPTIMIZERS = {
    "adamw_torch": "adam",
    "adamw_torch_fused": "adam",
    "adamw_hf": "adam",
    "adamw": "adam",
    "paged_adamw_32bit": "adam",
    "paged_adamw": "adam",
    "sgd": "sgd",
}
_STAGES = {"sft": "sft", "pt": "pretrain", "dpo": "dpo", "ipo": "dpo", "kto": "dpo"}
"""Kinds of training; a kind of preferences, such as ipo, is also a loss."""
_ADAPTERS = {"full": None, "lora": "lora", "qlora": "qlora"}
_LOSSES = {"sigmoid": "sigmoid", "ipo": "ipo", "hinge": "hinge"}
_TRUNCATIONS = {
    "drop": "drop",
    "truncate": "right",
    "raise": "refuse",
    "keep_start": "right",
    "keep_end": "left",
}
_REASONS = {name: reason for reason, names in _TABLES["missing"].items() for name in names}
_BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps")
_CADENCES = ("save_steps", "eval_steps", "logging_steps")


@dataclass
class TrainerRun:
    """The settings of a file, on the way to those of a run."""

    framework: Framework
    translation: Translation = field(default_factory=Translation)
    options: dict[str, str] = field(default_factory=dict[str, str])
    """Options of ``megatron-bridge train``, by name; an empty text is a switch."""
    stage: str = "sft"
    """``sft``, ``dpo``, ``grpo``, ``distill`` or ``pretrain``."""
    adapter: str | None = None
    """``lora`` or ``dora``; None trains all weights."""


def translate(
    values: Mapping[Any, Any], ranks: int, framework: Framework | None = None
) -> TrainerRun:
    """Translate the keys of a file.

    Args:
        values: Content of the file.
        ranks: Data-parallel ranks, because the Trainer's batch sizes are for one of them.
        framework: Whose file it is; None finds out by its keys.

    Raises:
        UserError: a key is misspelled, or a value is not one that its framework accepts.
    """
    refuse(f"{key!r} is not a name: keys are texts" for key in values if not isinstance(key, str))
    run = TrainerRun(framework or framework_of(values))
    _refuse_rewards(values, run.framework)
    if run.framework is TRL_GRPO:
        run.stage = "grpo"
    if run.framework is TRL_GKD:
        run.stage = "distill"
    names = {_ALIASES.get(key, key): key for key in values}
    given = {
        name: to_number(name, values[key]) for name, key in names.items() if values[key] is not None
    }
    refuse([*_misspelled(values), *wrong_values(given, names)])
    if given.get("max_steps", 1) <= 0:  # means "not set" in the Trainer
        del given["max_steps"]
    if "max_steps" in given:  # it overrides the epochs
        given.pop("num_train_epochs", None)
    for key, value in given.items():
        _translate(key, value, run)
    _add_defaults(given, run)
    _set_principal_start(given, run)
    _set_warmup(given, run)
    _set_batch_size(given, ranks, run)
    if run.stage == "grpo":
        _set_generation(given, ranks, run)
    if run.stage == "distill":
        _set_distillation(given, run)
    _set_mode(run)
    run.translation.refuse_out_of_range(EARLY_RANGES)
    return run


def _refuse_rewards(values: Mapping[str, Any], framework: Framework) -> None:
    """Refuse keys of TRL's GRPOConfig in other files, where ``beta`` and ``loss_type`` mean something else."""
    key = next((key for key in values if key in TRL_GRPO.marks), None)
    if key is not None and framework is not TRL_GRPO:
        raise UserError(
            f"{key}={values[key]} is a setting of TRL's GRPOConfig, and the file is read as one of "
            f"{framework.name}: use --framework trl-grpo"
        )


def _misspelled(values: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each key that no framework has and that is close to a known one."""
    known = [*_SETTINGS, *_ALIASES, *_SPECIAL, *_BATCH, *_TABLES["implied"], *_REASONS]
    unknown = [key for key in values if key not in known]
    hints = {key: misspelling(key, known) for key in unknown}
    return [
        f"{key} is not a setting that this command knows{hint}"
        for key, hint in hints.items()
        if hint
    ]


def _translate(key: str, value: Any, run: TrainerRun) -> None:
    translation = run.translation
    if key in _SPECIAL:
        if (reason := _SPECIAL[key](value, run)) is not None:
            translation.missing[key] = reason
    elif key in _TABLES["implied"]:
        translation.implied[key] = "it is always on here, or not needed"
    elif value is False:
        translation.implied[key] = "it is off"
    elif key in _REASONS:
        translation.missing[key] = _REASONS[key]
    elif key in _CADENCES and (value < 1 or value != int(value)):
        translation.missing[key] = f"{value} is a share of the run: give a number of steps"
    elif key in _SETTINGS:
        for target in _SETTINGS[key]:
            translation.set(target, value, key)
    elif key not in _BATCH:
        translation.missing[key] = (
            "this command does not know it: look for a counterpart in docs/faq.md"
        )


def _add_defaults(given: Mapping[str, Any], run: TrainerRun) -> None:
    """Set what the framework assumes for keys that are not given."""
    silent = {
        key: value
        for key, value in run.framework.defaults.items()
        if key not in given and value is not None
    }
    if "max_steps" in given:
        silent.pop("num_train_epochs", None)
    if "fp16" in given:
        silent.pop("bf16", None)
    _translate_defaults(silent, run)
    if run.adapter is not None:
        _add_adapter_defaults(given, run)
    settings = _dataset_defaults(run)
    if "data" in run.options:
        for target, value in settings.items():
            if target not in run.translation.settings:
                run.translation.set(target, value, f"{run.framework.name} by default")
    else:  # a recipe's own data may have none of these settings
        run.translation.settings.pop("dataset.seed", None)
        given_with_data = " ".join(f"{target}={value}" for target, value in settings.items())
        run.translation.missing["dataset"] = f"no data is named: add --data PATH {given_with_data}"
    # the Trainer's schedules end at 0; a recipe's may end above
    if "optimizer.min_lr" not in run.translation.settings:
        run.translation.set("optimizer.min_lr", 0.0, "lr_scheduler_type")


def _dataset_defaults(run: TrainerRun) -> dict[str, str]:
    """The settings of records that the framework assumes."""
    if run.stage in ("pretrain", "grpo"):
        return {}
    settings = {**run.framework.dataset}
    if settings and "packed-sequence" not in run.options:
        settings["dataset.packed_sequence_specs"] = "null"
    if run.stage == "dpo":
        settings.pop("dataset.train_on", None)
        settings.pop("dataset.packed_sequence_specs", None)
    return settings


def _add_adapter_defaults(given: Mapping[str, Any], run: TrainerRun) -> None:
    silent = {key: value for key, value in run.framework.adapters.items() if key not in given}
    if (
        run.framework is AXOLOTL
        and "lora_target" not in given
        and "lora_target_linear" not in given
    ):
        run.translation.missing["lora_target_modules"] = (
            "it is not given, and the recipe's layers are adapted: set peft.target_modules"
        )
    rank = given.get("lora_r", silent.get("lora_r"))
    if run.framework is LLAMA_FACTORY and "lora_alpha" not in given:
        silent["lora_alpha"] = 2 * rank
    needed = [key for key in ("lora_r", "lora_alpha") if key not in given and key not in silent]
    refuse(
        f"{key} is not given, and {run.framework.name} has no default for it: add it to the file"
        for key in needed
    )
    _translate_defaults(silent, run)


def _translate_defaults(silent: Mapping[str, Any], run: TrainerRun) -> None:
    """Translate values that the file does not give, and say in the report where they come from."""
    before = set(run.translation.settings)
    for key, value in silent.items():
        if key in {"warmup_steps", "warmup_ratio"}:
            continue  # these depend on each other
        _translate(key, value, run)
        for target in run.translation.settings.keys() - before:
            run.translation.origins[target] = f"{run.framework.name}'s default of {key}"
        before = set(run.translation.settings)


def _set_warmup(given: Mapping[str, Any], run: TrainerRun) -> None:
    """Set the warmup as steps or as a share of the run, and nothing of the recipe's."""
    source = next((key for key in ("warmup_steps", "warmup_ratio") if given.get(key)), None)
    if source is None and "warmup_steps" in given:
        source = "warmup_steps"
    warmup = given[source] if source else run.framework.defaults.get("warmup_steps")
    if warmup is None:  # a share by default
        warmup = run.framework.defaults["warmup_ratio"]
        source = "warmup_ratio"
        if "max_steps" in given:
            warmup = min(int(warmup * given["max_steps"]), _MOST_WARMUP)
        else:
            run.translation.missing["warmup_ratio"] = (
                f"{run.framework.name} takes {warmup:.0%} of the run and at most {_MOST_WARMUP} steps: with more, "
                f"set scheduler.lr_warmup_iters={_MOST_WARMUP} and scheduler.lr_warmup_fraction=null"
            )
    if given.get("lr_scheduler_type") == "constant":
        warmup = 0  # as in transformers, where only constant_with_warmup has one
    is_share = source == "warmup_ratio" or 0 < warmup < 1
    is_share = is_share and warmup <= 1
    if run.framework is AXOLOTL and warmup == 1 and not is_share:
        warmup = 2  # as axolotl does
    steps = 0 if is_share else math.ceil(warmup)
    label = source or f"{run.framework.name}'s default of warmup_steps"
    run.translation.set("scheduler.lr_warmup_iters", steps, label)
    run.translation.set("scheduler.lr_warmup_fraction", warmup if is_share else None, label)
    if warmup:
        run.translation.set(
            "scheduler.lr_warmup_init", 0.0, f"start of {run.framework.name}'s warmup"
        )


_MOST_WARMUP = 100
"""Steps to which axolotl limits the warmup that it takes by default."""


def _set_batch_size(given: Mapping[str, Any], ranks: int, run: TrainerRun) -> None:
    factors = [given.get(key, run.framework.defaults[key]) for key in _BATCH]
    label = f"{' x '.join(_BATCH)} x {ranks} ranks"
    run.translation.set("train.global_batch_size", math.prod(factors) * ranks, label)
    name = "per_device_eval_batch_size"
    if name in given:
        samples = given[name] * ranks
        run.translation.set("validation.eval_global_batch_size", samples, f"{name} x {ranks} ranks")


def _set_generation(given: Mapping[str, Any], ranks: int, run: TrainerRun) -> None:
    """Set how many steps share a generation, which TRL counts in microbatches or in completions."""
    per_device, accumulation = (given.get(key, run.framework.defaults[key]) for key in _BATCH)
    microbatches = given.get("steps_per_generation", accumulation)
    source = "steps_per_generation"
    if "generation_batch_size" in given:
        source = "generation_batch_size"
        microbatches = given[source] / (per_device * ranks)
    if microbatches % accumulation:
        raise UserError(
            f"{source}={given[source]}: a generation is {microbatches:g} microbatches of {per_device} x {ranks} "
            f"completions, and a step {accumulation}: give a multiple of a step"
        )
    steps = int(microbatches / accumulation)
    if steps != 1:
        run.translation.set("grpo.steps_per_generation", steps, source)
    missing = run.translation.missing
    missing["reward functions"] = (
        "name them on the command line: grpo.reward_funcs=[rewards.py:score]"
    )
    missing["seq_length"] = (
        "TRL does not limit prompts: --seq-length is the longest prompt plus max_completion_length"
    )


def _set_distillation(given: Mapping[str, Any], run: TrainerRun) -> None:
    """Set what TRL's GKDTrainer always does: it learns from the teacher alone, which is the model itself by default."""
    for key, value in (("ce_weight", 0.0), ("kl_weight", 1.0)):
        run.translation.set(f"distill.{key}", value, "GKDTrainer")
    if "teacher_model_name_or_path" not in given:
        run.translation.missing["teacher_model_name_or_path"] = (
            "it is not given, and TRL takes the model itself: set distill.teacher"
        )


def _set_mode(run: TrainerRun) -> None:
    """Choose the options of the command by stage and adapter."""
    translation = run.translation
    if run.adapter is None:
        for key in [key for key in translation.settings if key.startswith("peft.")]:
            translation.drop(key, "all weights are trained")
    if run.stage != "dpo":
        _drop_block("dpo", "no preferences are trained", run)
    if run.stage != "grpo":
        _drop_block("grpo", "no rewards are trained on", run)
    if run.stage != "distill":
        _drop_block("distill", "there is no teacher", run)
    if run.stage in ("dpo", "grpo", "distill"):
        run.options["mode"] = run.stage
        if run.adapter is not None:
            run.options["peft-scheme"] = run.adapter
    elif run.framework is not FRAMEWORKS["trainer"] or run.adapter is not None:
        run.options["mode"] = run.adapter or run.stage


def _drop_block(block: str, reason: str, run: TrainerRun) -> None:
    """Drop the settings of an objective that is not that of the run; a key that sets both is not reported."""
    translation = run.translation
    for key in [key for key in translation.settings if key.startswith(f"{block}.")]:
        origin = translation.origins[key]
        translation.drop(key, reason)
        of_stage = [name for name in translation.settings if name.startswith(f"{run.stage}.")]
        if origin in {translation.origins[name] for name in of_stage}:
            translation.implied.pop(origin, None)


def _choose(target: str, known: Mapping[str, str], value: Any, run: TrainerRun) -> str | None:
    """Set ``target`` to this package's name of the value."""
    if not isinstance(value, str) or value not in known:
        names = ", ".join(dict.fromkeys(known.values()))
        return f"{value} has no counterpart: set {target} to one of {names}"
    run.translation.set(target, known[value], value)
    return None


def _schedule(value: Any, run: TrainerRun) -> str | None:
    return _choose("scheduler.lr_decay_style", _SCHEDULES, value, run)


def _stage(value: Any, run: TrainerRun) -> str | None:
    if value is False:
        return None
    if str(value) not in _STAGES:
        raise UserError(f"stage={value} has no counterpart: this package has {', '.join(_STAGES)}")
    run.stage = _STAGES[value]
    if run.stage == "dpo" and value != "dpo":
        run.translation.set("dpo.loss_type", value, "stage")
    return None


def _finetuning_type(value: Any, run: TrainerRun) -> str | None:
    if value is False:
        return None
    if str(value) not in _ADAPTERS:
        names = ", ".join(_ADAPTERS)
        raise UserError(f"{value} is not a way to fine-tune here: use one of {names}")
    if _ADAPTERS[value] is not None and run.adapter is None:
        run.adapter = _ADAPTERS[value]
    return None


def _use_peft(value: Any, run: TrainerRun) -> str | None:
    return _finetuning_type("lora", run) if value else None


def _load_in_4bit(value: Any, run: TrainerRun) -> None:
    if value:
        run.translation.set("peft.base_precision", "nf4", "load_in_4bit")


def _quantization_bit(value: Any, run: TrainerRun) -> str | None:
    if value == 4:
        _load_in_4bit(True, run)
        return None
    return "set peft.base_precision=fp8" if value == 8 else "set peft.base_precision"


def _use_dora(value: Any, run: TrainerRun) -> None:
    if value:
        run.adapter = "dora"


def _init_lora_weights(value: Any, run: TrainerRun) -> str | None:
    if value is True:
        run.translation.set("peft.lora_A_init_method", "kaiming", "init_lora_weights")
    elif isinstance(value, str) and value.startswith("pissa"):
        run.translation.set("peft.init_lora_weights", value, "init_lora_weights")
    else:
        return "the factors start with peft.lora_A_init_method, or as pissa: docs/peft.md"
    return None


def _set_principal_start(given: Mapping[str, Any], run: TrainerRun) -> None:
    """Start with PiSSA as LLaMA-Factory does, which approximates in 16 iterations unless it is told to be exact."""
    if not given.get("pissa_init"):
        return
    iterations = given.get("pissa_iter", 16)
    init = "pissa" if iterations == -1 else f"pissa_niter_{iterations}"
    run.translation.set("peft.init_lora_weights", init, "pissa_init")


def _precision(name: str, value: Any, run: TrainerRun) -> None:
    if value:
        run.translation.set("mixed_precision", f"{name}_mixed", name)
    elif "mixed_precision" not in run.translation.settings:
        run.translation.set("mixed_precision", "fp32", name)


def _train_on(when_true: str, when_false: str | None, value: Any, run: TrainerRun) -> None:
    chosen = when_true if value else when_false
    if chosen is not None:
        run.translation.set("dataset.train_on", chosen, "part of the loss")


def _loss_type(value: Any, run: TrainerRun) -> str | None:
    names = value if isinstance(value, list) else [value]
    if run.stage == "grpo":
        policy_losses = {name: name for name in get_args(PolicyLossType)}
        return _choose("grpo.loss_type", policy_losses, value, run)
    if run.stage == "sft" and names == ["nll"]:
        return None
    if len(names) != 1:
        return f"{value}: choose one of {', '.join(_LOSSES)} for dpo.loss_type"
    return _choose("dpo.loss_type", _LOSSES, names[0], run)


def _scale_rewards(value: Any, run: TrainerRun) -> str | None:
    names = {"True": "group", "False": "none", **{name: name for name in get_args(RewardScale)}}
    return _choose("grpo.scale_rewards", names, str(value), run)


def _truncation(value: Any, run: TrainerRun) -> str | None:
    return _choose("dataset.truncation", _TRUNCATIONS, value, run)


def _scheduler_options(value: Any, run: TrainerRun) -> str | None:
    options: Mapping[str, Any] = value if isinstance(value, Mapping) else {}
    if options.keys() == {"min_lr"}:
        run.translation.set("optimizer.min_lr", options["min_lr"], "lr_scheduler_kwargs.min_lr")
        return None
    return "set the fields of scheduler that they stand for, such as optimizer.min_lr"


def _packing(value: Any, run: TrainerRun) -> None:
    if value:
        run.options["packed-sequence"] = ""


def _recompute(value: Any, run: TrainerRun) -> None:
    if not value:
        return
    for name, setting in (("granularity", "full"), ("method", "uniform"), ("num_layers", 1)):
        run.translation.set(f"model.recompute_{name}", setting, "gradient_checkpointing")


def _dataset(value: Any, run: TrainerRun) -> str | None:
    """Set the path of a single dataset, and the format that axolotl's list names."""
    parts: list[Any] = value if isinstance(value, list) else [value]
    if len(parts) != 1 or (isinstance(parts[0], str) and "," in parts[0]):
        return "several datasets are a BlendedDatasetConfig: see docs/finetuning.md"
    entry: Mapping[str, Any] = parts[0] if isinstance(parts[0], Mapping) else {"path": parts[0]}
    if entry.get("path") is None:
        raise UserError("datasets: an entry has no path: give the file or the name of the data")
    run.options["data"] = str(entry["path"])
    if "alpaca" in str(entry.get("type", entry["path"])):
        run.translation.set("dataset.process_example_fn", "alpaca_example", "dataset")
    return None


def _targets(value: Any, run: TrainerRun) -> str | None:
    """Set the adapted layers, whose names are those of Hugging Face on both sides."""
    if value is False:
        return None
    names = value.replace(",", " ").split() if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"lora_target={value}: give names of modules, such as q_proj")
    modules = ["all-linear"] if set(names) & {"all", "all-linear"} else names
    run.translation.set("peft.target_modules", json.dumps(modules), "lora_target")
    return None


def _model(value: Any, run: TrainerRun) -> None:
    run.options["hf-model"] = str(value)


def _answers_of_teacher(value: Any, run: TrainerRun) -> str | None:
    return (
        "the teacher writes no answers here: generate them first, and train on them"
        if value
        else None
    )


_SPECIAL: dict[str, Callable[[Any, TrainerRun], str | None]] = {
    "lr_scheduler_type": _schedule,
    "lr_scheduler_kwargs": _scheduler_options,
    "optim": partial(_choose, "optimizer.optimizer", _OPTIMIZERS),
    "stage": _stage,
    "finetuning_type": _finetuning_type,
    "use_peft": _use_peft,
    "use_dora": _use_dora,
    "init_lora_weights": _init_lora_weights,
    "pissa_init": lambda value, run: None,
    "pissa_iter": lambda value, run: None,
    "load_in_4bit": _load_in_4bit,
    "quantization_bit": _quantization_bit,
    "bf16": partial(_precision, "bf16"),
    "fp16": partial(_precision, "fp16"),
    "gradient_checkpointing": _recompute,
    "packing": _packing,
    "model_name_or_path": _model,
    "dataset": _dataset,
    "lora_target": _targets,
    "lora_target_linear": lambda value, run: _targets("all-linear", run) if value else None,
    "train_on_inputs": partial(_train_on, "everything", "assistant"),
    "mask_history": partial(_train_on, "last", None),
    "assistant_only_loss": partial(_train_on, "assistant", "everything"),
    "excess_length_strategy": _truncation,
    "truncation_mode": _truncation,
    "pref_loss": _loss_type,
    "loss_type": _loss_type,
    "scale_rewards": _scale_rewards,
    "seq_kd": _answers_of_teacher,
    "steps_per_generation": lambda value, run: None,
    "generation_batch_size": lambda value, run: None,
    "warmup_steps": lambda value, run: None,
    "warmup_ratio": lambda value, run: None,
}
"""Functions for keys that need code; each returns the reason if the value has no counterpart."""
