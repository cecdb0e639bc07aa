# SPDX-License-Identifier: Apache-2.0
"""``megatron-bridge tune --mode rl``: layouts and token budgets for reinforcement learning."""

import argparse
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from megatron.bridge.cli.support.text_format import columns
from megatron.bridge.cli.support.train_job import Job
from megatron.bridge.utils.errors import UserError

if TYPE_CHECKING:
    from megatron.bridge.autotune import rl
    from megatron.bridge.autotune.search.search import Search


def text(job: Job, search: "Search", args: argparse.Namespace) -> str:
    from megatron.bridge.autotune.rl import RLSearch, settings

    if not 0 <= args.engine_memory < 1:
        raise UserError(f"--engine-memory {args.engine_memory:g} is no part of a GPU: give a number from 0 to below 1")
    work = _job(args)
    fixed = {name: values[0] for name, values in search.space.sizes.items() if len(values) == 1}
    found = RLSearch(search.config, search.world_size, search.pricer.card, work, fixed).run(args.top)
    if not found:
        raise UserError(
            f"no layout fits on {search.world_size} x {search.pricer.card} beside an engine with "
            f"--engine-memory {work.engine:g}: add --offload, lower --max-token-len, or give more GPUs"
        )
    keys = dict(settings(work, found[0].price.candidate))
    if args.json:
        return json.dumps({"layouts": [_as_json(step) for step in found], **keys}, indent=2) + "\n"
    return "\n".join([*_lines(work, found), "", *_keys(keys)]) + "\n"


def _job(args: argparse.Namespace) -> "rl.Job":
    from megatron.bridge.autotune import rl

    limit = args.max_prompt_length + args.max_response_length
    lengths = rl.drawn_lengths(args.samples, args.max_prompt_length, args.max_response_length)
    train = args.max_token_len or 2 * limit
    return rl.Job(
        lengths=rl.read_lengths(args.lengths) if args.lengths else lengths,
        max_token_len=train,
        log_prob_max_token_len=args.log_prob_max_token_len or 2 * train,
        critic=args.critic,
        reference=not args.no_reference,
        offload=tuple(args.offload),
        engine=args.engine_memory,
    )


def _lines(job: "rl.Job", found: "list[rl.Step]") -> Iterator[str]:
    yield (
        f"{len(job.lengths):,} samples of {job.lengths.min():,} to {job.lengths.max():,} tokens, "
        f"{job.lengths.sum():,} together, in rows of {job.max_token_len:,}. Predicted, not measured:"
    )
    rows: list[tuple[str, ...]] = [("", "step", "log-probs", "update", "without balance", "rows", "GB", "layout")]
    for place, step in enumerate(found, 1):
        seconds = (step.seconds, step.log_probs, step.update, step.unbalanced)
        texts = [f"{each:.2f} s" for each in seconds]
        rows.append(
            (str(place), *texts, f"{step.rows[0]}", f"{step.price.fullest / 1e9:.1f}", step.price.candidate.label())
        )
    yield from columns(rows)


def _keys(keys: dict[str, dict[str, Any]]) -> Iterator[str]:
    for name, values in keys.items():
        yield f"{name}: " + " ".join(f"{key}={value}" for key, value in values.items())


def _as_json(step: "rl.Step") -> dict[str, Any]:
    return {
        "layout": step.price.candidate.label(),
        "step_seconds": step.seconds,
        "log_prob_seconds": step.log_probs,
        "update_seconds": step.update,
        "update_seconds_without_balance": step.unbalanced,
        "rows": list(step.rows),
        "bytes": list(step.price.memory),
    }
