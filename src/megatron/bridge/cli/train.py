# SPDX-License-Identifier: Apache-2.0
"""``megatron-bridge train``: run a recipe, with overrides, on this machine or under torchrun."""

import argparse
import os
import sys
from pathlib import Path

from megatron.bridge.cli.job import MODES, Job, forward_step, prepare
from megatron.bridge.utils.errors import UserError
from megatron.bridge.utils.start_up import uncollected

EXAMPLES = """examples:
  megatron-bridge train --list llama pretrain
  megatron-bridge train --recipe llama32_1b_pretrain_config --dry-run model.tensor_model_parallel_size=2
  megatron-bridge train --recipe llama3_70b_pretrain_config --rehearse
  torchrun --nproc-per-node=8 -m megatron.bridge.cli.main train --recipe llama32_1b_pretrain_config \\
      --data corpus/text checkpoint.save=runs/llama train.train_iters=5000
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add ``train``."""
    parser = subparsers.add_parser(
        "train",
        help="pretrain or fine-tune a model from a recipe",
        description="Pretrain or fine-tune a model from a recipe.",
        epilog=EXAMPLES,
    )
    add_job_options(parser)
    parser.add_argument(
        "--list", nargs="*", metavar="WORD", help="show the recipes that contain all words, and end"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the resolved config and what it means, and end"
    )
    parser.add_argument(
        "--rehearse",
        nargs="?",
        type=int,
        const=2,
        metavar="STEPS",
        help="run the same layout at toy size here, over gloo: steps, checkpoint, resume, export; and end",
    )
    parser.add_argument(
        "--world-size", type=int, metavar="N", help="processes to assume in a dry run or a rehearsal"
    )


def add_job_options(parser: argparse.ArgumentParser) -> None:
    """Add what says which job to run; the rest of the options say what to do with it."""
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="settings to change, in YAML")
    parser.add_argument("--recipe", metavar="NAME", help="recipe to run; --list shows all")
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="YAML file: settings on top of --recipe, or a whole config"
    )
    parser.add_argument(
        "--hf-model",
        metavar="ID",
        help="directory or hub id of a model to train instead of the recipe's: sizes, tokenizer, weights to tune",
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
    """List, show, rehearse, or train."""
    if args.list is not None:
        return _list(args)
    _check_options(args)
    with uncollected():
        job = prepare(args)
        if args.dry_run:
            return _dry_run(job, args)
    if args.rehearse is not None:
        return _rehearse(job, args)
    return _train(job, args)


def _check_options(args: argparse.Namespace) -> None:
    if args.world_size is not None and not args.dry_run and args.rehearse is None:
        raise UserError(
            "--world-size is for --dry-run and --rehearse; torchrun --nproc-per-node starts that many processes"
        )
    if args.world_size is not None and args.world_size < 1:
        raise UserError(f"--world-size {args.world_size}: there is at least one process")
    if args.rehearse is not None and args.rehearse < 1:
        raise UserError(f"--rehearse {args.rehearse}: at least one step is needed")
    if args.dry_run and args.rehearse is not None:
        raise UserError("--dry-run and --rehearse are two things: leave one out")


def _list(args: argparse.Namespace) -> int:
    from megatron.bridge.cli.recipe_table import table
    from megatron.bridge.recipes.catalog import search

    words = " ".join([*args.list, *args.overrides])
    recipes = search(words)
    if not recipes:
        raise UserError(f"no recipe contains {words!r}; --list alone shows all of them")
    _print(table(recipes))
    return 0


def _print(text: str) -> None:
    """Write to standard output, once for all ranks."""
    if os.environ.get("RANK", "0") == "0":
        sys.stdout.write(text)


def _dry_run(job: Job, args: argparse.Namespace) -> int:
    from megatron.bridge.cli.dry_run import report

    forward_step(args.step_func)
    _print(report(job, args.world_size))
    return 0


def _rehearse(job: Job, args: argparse.Namespace) -> int:
    from megatron.bridge.cli.rehearse import rehearse

    return rehearse(job, args.rehearse, args.step_func, args.world_size)


def _train(job: Job, args: argparse.Namespace) -> int:
    import copy

    from megatron.bridge.cli.summary import describe, warnings
    from megatron.bridge.training.distill import distill
    from megatron.bridge.training.distillation.precompute import precompute
    from megatron.bridge.training.finetune import finetune
    from megatron.bridge.training.pretrain import pretrain
    from megatron.bridge.utils import dist
    from megatron.bridge.utils.config.overrides import check_sticks
    from megatron.bridge.utils.console import console

    if job.mode == "cache-teacher":
        precompute(job.config)
        return _leave()
    step = forward_step(args.step_func)
    resolved = copy.deepcopy(job.config)  # the run resolves its own, and tells what it replaced
    resolved.validate()
    check_sticks(resolved, job.changes)
    for line in [*describe(resolved, dist.world_size()), *(f"note: {line}" for line in warnings(resolved))]:
        console().print(line, markup=False)
    if job.mode == "distill":
        distill(job.config)
    else:
        (pretrain if job.mode == "pretrain" else finetune)(job.config, step)
    return _leave()


def _leave() -> int:
    """End the process groups."""
    from megatron.core import parallel_state
    from torch import distributed

    parallel_state.destroy_model_parallel()
    distributed.destroy_process_group()
    return 0
