# SPDX-License-Identifier: Apache-2.0
"""``megatron-bridge tune --mode rl``: layouts and token budgets for reinforcement learning."""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.bridge.cli.support.parser import count
from megatron.bridge.cli.support.text_format import columns
from megatron.bridge.cli.support.train_job import TrainJob
from megatron.bridge.utils.errors import UserError

if TYPE_CHECKING:
    from megatron.bridge.autotune import rl
    from megatron.bridge.autotune.search.search import Search


def add_rl_options(parser: argparse.ArgumentParser) -> None:
    """Add the step of reinforcement learning that ``tune --mode rl`` plans."""
    group = parser.add_argument_group("with --mode rl")
    group.add_argument(
        "--samples",
        type=count,
        default=512,
        metavar="N",
        help="samples of a step (default: 512)",
    )
    group.add_argument(
        "--max-prompt-length",
        type=count,
        default=1024,
        metavar="N",
        help="tokens (default: 1024)",
    )
    group.add_argument(
        "--max-response-length",
        type=count,
        default=3072,
        metavar="N",
        help="tokens (default: 3072)",
    )
    group.add_argument(
        "--lengths",
        type=Path,
        metavar="FILE",
        help="tokens of a sample in each line (default: drawn)",
    )
    group.add_argument(
        "--max-token-len",
        nargs="+",
        type=count,
        metavar="N",
        help=(
            "tokens of a packed row in the update; several are compared (default: 1, 2 and 4 "
            "times the longest)"
        ),
    )
    group.add_argument(
        "--log-prob-max-token-len",
        type=count,
        metavar="N",
        help="the same for forward-only passes (default: twice)",
    )
    group.add_argument("--critic", action="store_true", help="train a critic of the same size, too")
    group.add_argument(
        "--no-reference", action="store_true", help="train without a reference policy"
    )
    group.add_argument(
        "--offload",
        nargs="+",
        choices=["params", "grads", "optimizer", "reference"],
        default=[],
        help="tensors to keep in host memory while they are not needed",
    )
    group.add_argument(
        "--engine-memory",
        type=float,
        default=0.5,
        metavar="PART",
        help="share of GPU memory for the engine (0.5)",
    )


def text(job: TrainJob, search: "Search", args: argparse.Namespace) -> str:
    from megatron.bridge.autotune.rl import RLSearch, settings

    if not 0 <= args.engine_memory < 1:
        raise UserError(
            f"--engine-memory {args.engine_memory:g} must be from 0 to below 1, a fraction of a GPU"
        )
    fixed = {name: values[0] for name, values in search.space.sizes.items() if len(values) == 1}
    searches = [
        RLSearch(search.config, search.world_size, search.pricer.card, job, fixed)
        for job in _jobs(args)
    ]
    steps = sorted(
        (step for rl_search in searches for step in rl_search.run(args.top)),
        key=lambda step: step.seconds,
    )
    if not steps:
        raise UserError(
            f"no layout fits on {search.world_size} x {search.pricer.card} together with an engine with "
            f"--engine-memory {args.engine_memory:g}: add --offload, lower --max-token-len, or give more GPUs"
        )
    steps, keys = steps[: args.top], dict(settings(steps[0]))
    if args.json:
        return json.dumps({"layouts": [_as_json(step) for step in steps], **keys}, indent=2) + "\n"
    return "\n".join([*_lines(steps), "", *_keys(keys)]) + "\n"


def _jobs(args: argparse.Namespace) -> "list[rl.RLJob]":
    from megatron.bridge.autotune import rl

    limit = args.max_prompt_length + args.max_response_length
    lengths = rl.drawn_lengths(args.samples, args.max_prompt_length, args.max_response_length)
    if args.lengths:
        lengths = rl.read_lengths(args.lengths)
        limit = int(lengths.max())
    return [
        rl.RLJob(
            lengths=lengths,
            max_token_len=tokens,
            log_prob_max_token_len=args.log_prob_max_token_len or 2 * tokens,
            critic=args.critic,
            reference=not args.no_reference,
            offload=tuple(args.offload),
            engine=args.engine_memory,
        )
        for tokens in args.max_token_len or (limit, 2 * limit, 4 * limit)
    ]


def _lines(steps: "list[rl.RLStep]") -> Iterator[str]:
    lengths = steps[0].job.lengths
    yield (
        f"{len(lengths):,} samples of {lengths.min():,} to {lengths.max():,} tokens, {lengths.sum():,} together. "
        "Predicted, not measured:"
    )
    heads = ("step", "log-probs", "update", "without balance", "rows", "of tokens", "GB", "layout")
    rows: list[tuple[str, ...]] = [("", *heads)]
    for rank, step in enumerate(steps, 1):
        texts = [
            f"{seconds:.2f} s"
            for seconds in (step.seconds, step.log_probs, step.update, step.unbalanced)
        ]
        texts += [
            f"{step.rows[0]}",
            f"{step.job.max_token_len:,}",
            f"{step.price.fullest / 1e9:.1f}",
        ]
        rows.append((str(rank), *texts, step.price.candidate.label()))
    yield from columns(rows)


def _keys(keys: dict[str, dict[str, Any]]) -> Iterator[str]:
    for name, values in keys.items():
        yield f"{name}: " + " ".join(f"{key}={value}" for key, value in values.items())


def _as_json(step: "rl.RLStep") -> dict[str, Any]:
    return {
        "layout": step.price.candidate.label(),
        "max_token_len": step.job.max_token_len,
        "step_seconds": step.seconds,
        "log_prob_seconds": step.log_probs,
        "update_seconds": step.update,
        "update_seconds_without_balance": step.unbalanced,
        "rows": list(step.rows),
        "bytes": list(step.price.memory),
    }
