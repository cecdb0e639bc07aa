# SPDX-License-Identifier: Apache-2.0
"""``megatron-bridge train``: run a recipe, with overrides, on this machine or under torchrun."""

import argparse
import os
import sys

from megatron.bridge.cli.support.one_process import fit_to_one_process
from megatron.bridge.cli.support.options import add_recipe_options
from megatron.bridge.cli.support.output_files import HtmlPage, OutputFile
from megatron.bridge.cli.support.parser import Parser, count
from megatron.bridge.cli.support.text_format import write_file
from megatron.bridge.cli.support.train_job import (
    STEPS,
    TrainJob,
    forward_step,
    prepare,
    step_function,
)
from megatron.bridge.recipes.catalog import search
from megatron.bridge.utils.config.overrides import check_sticks
from megatron.bridge.utils.errors import UserError
from megatron.bridge.utils.startup import without_gc
from megatron.bridge.utils.torchrun_env import read_number

EXAMPLES = r"""examples:
  megatron-bridge train --list llama pretrain
  megatron-bridge train --recipe llama32_1b_pretrain_config --dry-run model.tensor_model_parallel_size=2
  megatron-bridge train --recipe llama3_70b_pretrain_config --rehearse
  megatron-bridge train --recipe llama31_405b_pretrain_config --rehearse-rank 517 --world-size 16384
  torchrun --nproc-per-node=8 -m megatron.bridge.cli.main train --recipe llama32_1b_pretrain_config \
      --data corpus/text checkpoint.save=runs/llama train.train_iters=5000
"""


def add_arguments(parser: Parser) -> None:
    parser.description = "Pretrain or fine-tune a model from a recipe."
    parser.epilog = EXAMPLES
    add_recipe_options(parser)
    parser.add_argument(
        "--list",
        nargs="*",
        metavar="WORD",
        help="list the recipes that contain all words, and exit",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help=(
            "print the resolved config with its memory and compute, check data and weights, and "
            "exit"
        ),
    )
    parser.add_argument(
        "--summary",
        action="store_true",
        help="with --dry-run: print the summary without the config",
    )
    parser.add_argument(
        "--timeline",
        type=HtmlPage,
        metavar="FILE",
        help="with --dry-run: write an HTML page with the predicted pipeline of a step",
    )
    parser.add_argument(
        "--rehearse",
        nargs="?",
        type=count,
        const=2,
        metavar="STEPS",
        help=(
            "run the same layout at toy size on this machine (steps, checkpoint, resume, export), "
            "and exit"
        ),
    )
    parser.add_argument(
        "--rehearse-rank",
        type=int,
        metavar="RANK",
        help=(
            "run the set-up and a step of one rank of a large job in this process, without "
            "memory, print each part's cost and the messages, and exit"
        ),
    )
    parser.add_argument(
        "--messages",
        type=OutputFile,
        metavar="FILE",
        help="with --rehearse-rank, write each message in order as JSON lines",
    )
    parser.add_argument(
        "--world-size",
        type=count,
        metavar="N",
        help="processes to assume in a dry run or a rehearsal",
    )


def run(args: argparse.Namespace) -> int:
    if args.list is not None:
        return _list(args)
    _check_options(args)
    with without_gc():
        if args.step_func not in (None, *STEPS):
            step_function(args.step_func)  # before anything slow is imported
        job = prepare(args)
        if args.dry_run:
            if args.world_size == 1:
                fit_to_one_process(job)
            return _dry_run(job, args)
    if args.rehearse_rank is not None:
        from megatron.bridge.cli.rehearse.rank import rehearse_rank

        return rehearse_rank(job, args.rehearse_rank, args.world_size, args.messages)
    if args.rehearse is not None:
        from megatron.bridge.cli.rehearse.command import rehearse

        return rehearse(job, args.rehearse, args.step_func, args.world_size)
    return _train(job, args)


def _check_options(args: argparse.Namespace) -> None:
    given = {
        "--dry-run": args.dry_run or None,
        "--rehearse": args.rehearse,
        "--rehearse-rank": args.rehearse_rank,
    }
    modes = [option for option, value in given.items() if value is not None]
    if args.world_size is not None and not modes:
        raise UserError(
            "--world-size is for --dry-run and --rehearse; torchrun --nproc-per-node starts that many processes"
        )
    for option, value in {"--timeline": args.timeline, "--summary": args.summary or None}.items():
        if value is not None and not args.dry_run:
            raise UserError(f"{option} needs --dry-run: add it, or leave {option} out")
    if args.messages is not None and args.rehearse_rank is None:
        raise UserError(
            f"--messages {args.messages} needs --rehearse-rank: add it, or leave --messages out"
        )
    if len(modes) > 1:
        raise UserError(f"{' and '.join(modes[:2])} cannot be used together: leave one out")


def _list(args: argparse.Namespace) -> int:
    from megatron.bridge.cli.support.recipe_table import table

    words = " ".join([*args.list, *args.overrides])
    recipes = search(words)
    if not recipes:
        raise UserError(f"no recipe contains {words!r}; --list alone shows all of them")
    _print(table(recipes))
    return 0


def _print(text: str) -> None:
    """Write to standard output on the first rank."""
    if os.environ.get("RANK", "0") == "0":
        sys.stdout.write(text)


def _dry_run(job: TrainJob, args: argparse.Namespace) -> int:
    from megatron.bridge.cli.support.dry_run import report, timeline_page

    forward_step(args.step_func, job.config)
    dry_run_report = report(job, args.world_size)
    _print(
        dry_run_report.summary if args.summary else dry_run_report.config + dry_run_report.summary
    )
    if args.timeline is not None:
        write_file("--timeline", args.timeline, timeline_page(job, args.world_size))
    return 0 if dry_run_report.runs else 1


def _train(job: TrainJob, args: argparse.Namespace) -> int:
    from megatron.bridge.cli.support.summary import describe, warnings
    from megatron.bridge.training.distill import distill
    from megatron.bridge.training.distillation.cache_teacher import precompute
    from megatron.bridge.training.dpo import dpo
    from megatron.bridge.training.finetune import finetune
    from megatron.bridge.training.grpo import grpo
    from megatron.bridge.training.pretrain import pretrain
    from megatron.bridge.training.setup import resolve_run
    from megatron.bridge.utils.console import print_rank_0

    if read_number("WORLD_SIZE", 1) == 1:
        fit_to_one_process(job)
    if job.mode == "cache-teacher":
        precompute(job.config)
        return _destroy_process_groups()
    step = forward_step(args.step_func, job.config)
    resolved = resolve_run(job.config, job.origins)
    resolved.notes.extend(job.notes)
    config = resolved.config
    check_sticks(config, job.changes)
    for line in [
        *describe(config, resolved.world_size),
        *(f"note: {line}" for line in warnings(config)),
    ]:
        print_rank_0(line)
    objectives = {"distill": distill, "dpo": dpo, "grpo": grpo}
    if job.mode in objectives:
        objectives[job.mode](resolved)
    else:
        (pretrain if job.mode == "pretrain" else finetune)(resolved, step)
    return _destroy_process_groups()


def _destroy_process_groups() -> int:
    from megatron.core import parallel_state
    from torch import distributed

    parallel_state.destroy_model_parallel()
    distributed.destroy_process_group()
    return 0
