# SPDX-License-Identifier: Apache-2.0
"""``megatron-bridge plan``: what becomes what, without reading a weight."""

import argparse
import re
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from megatron.bridge.cli import convert

if TYPE_CHECKING:
    from megatron.bridge.models.conversion.plan import WeightConversionTask

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)|(?<=\.weight)\d+$|(?<=\.bias)\d+$")  # of a layer, of an expert
_WIDTH = 200  # of what is not a terminal: names stay on one line


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add ``plan``."""
    parser = subparsers.add_parser(
        "plan",
        help="which tensor becomes which parameter, without reading weights",
        description="Print the conversion plan of a model: which Hugging Face tensors become which Megatron "
        "parameter, cut how. No weight is read; the model is built without memory.",
    )
    convert.add_model_arguments(parser)
    parser.add_argument("--full", action="store_true", help="a line for each parameter, not for each kind of them")
    parser.set_defaults(run=run)


class Kind(NamedTuple):
    """Parameters that differ in their numbers (layer, expert) only."""

    megatron: str
    shard: str
    cut: str
    mapping: str
    hf: str


def fold(tasks: "Iterable[WeightConversionTask]") -> dict[Kind, int]:
    """How many parameters there are of each kind, numbers in names written as ``*``."""
    kinds: dict[Kind, int] = {}
    for task in tasks:
        kind = Kind(
            _NUMBER.sub("*", task.global_param_name),
            "x".join(map(str, task.shard.shape)) or "scalar",
            f"{task.shard.kind}/{task.shard.parts}",
            type(task.mapping).__name__ + (" (copy)" if task.is_copy else ""),
            "\n".join(_NUMBER.sub("*", name) for name in task.mapping.hf_names),
        )
        kinds[kind] = kinds.get(kind, 0) + 1
    return kinds


def run(args: argparse.Namespace) -> int:
    """Print the plan on standard output."""
    from rich.console import Console
    from rich.table import Column, Table

    from megatron.bridge import AutoBridge
    from megatron.bridge.utils import dist

    sizes = convert.layout(args)
    bridge = AutoBridge.from_hf_pretrained(args.hf_model, trust_remote_code=args.trust_remote_code)
    compared = any(bridge.hf_pretrained.directory.glob("*.safetensors"))
    if not compared:
        bridge = AutoBridge.from_hf_config(bridge.hf_config)
    provider = bridge.to_megatron_provider(load_weights=False)
    convert.set_layout(provider, sizes)
    plan = bridge.plan(provider.meta_model())
    if dist.rank() != 0:
        return 0
    if args.full:
        print(plan)  # noqa: T201 - a plan is for pipes too
        return 0
    names = (Column(title, overflow="fold") for title in ("Megatron parameter", "Hugging Face tensors"))
    table = Table(next(names), "shard", "cut", "mapping", next(names), "how many")
    for kind, count in fold(plan.tasks).items():
        table.add_row(*kind, str(count))
    output = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else _WIDTH)
    output.print(table)
    ties = f", {len(plan.ties)} of them tied" if plan.ties else ""
    closes = "the plan closes" if compared else "there are no weights to compare the names with"
    output.print(f"{len(plan.tasks)} parameters, {len(plan.hf_names)} Hugging Face tensors{ties}: {closes}")
    return 0
