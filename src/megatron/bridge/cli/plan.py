# SPDX-License-Identifier: Apache-2.0
"""``megatron-bridge plan``: which tensor becomes which parameter, without reading weights."""

import argparse
import re
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from megatron.bridge.cli.support import model_options, text_format
from megatron.bridge.models.hf_pretrained import hub

if TYPE_CHECKING:
    from megatron.bridge.models.conversion.engine.plan import WeightConversionTask

_NUMBER = re.compile(
    r"(?<=\.)\d+(?=\.)|(?<=\.weight)\d+$|(?<=\.bias)\d+$"
)  # of a layer or an expert


class Kind(NamedTuple):
    """Parameters whose names differ only in the numbers of layers and experts."""

    megatron: str
    shard: str
    split: str
    mapping: str
    hf: str


def count_kinds(tasks: "Iterable[WeightConversionTask]") -> Counter[Kind]:
    """The number of parameters of each kind; numbers in names are written as ``*``."""
    return Counter(
        Kind(
            _NUMBER.sub("*", task.global_param_name),
            text_format.shape(task.shard.shape),
            f"{task.shard.kind}/{task.shard.parts}",
            type(task.mapping).__name__ + (" (copy)" if task.is_copy else ""),
            "\n".join(_NUMBER.sub("*", name) for name in task.mapping.hf_names),
        )
        for task in tasks
    )


def run(args: argparse.Namespace) -> int:
    hub.local_folder(args.hf_model)  # before anything slow is imported
    sizes = model_options.parallel_sizes(args)
    from rich.table import Column, Table

    from megatron.bridge import AutoBridge
    from megatron.bridge.utils import distributed

    bridge = AutoBridge.from_hf_pretrained(args.hf_model, trust_remote_code=args.trust_remote_code)
    has_weights = bridge.hf_pretrained.has_weights_here
    if not has_weights:
        bridge = AutoBridge.from_hf_config(bridge.hf_config)
    provider = bridge.to_megatron_provider(load_weights=False)
    model_options.set_parallel_sizes(provider, sizes)
    plan = bridge.plan(provider.meta_model())
    if distributed.rank() != 0:
        return 0
    if args.full:
        text_format.say(str(plan))
        return 0
    names = (
        Column(title, overflow="fold") for title in ("Megatron parameter", "Hugging Face tensors")
    )
    table = Table(next(names), "shard", "split", "mapping", next(names), "count")
    for kind, count in count_kinds(plan.tasks).items():
        table.add_row(*kind, str(count))
    output = text_format.table_console()
    output.print(table)
    ties = f", {len(plan.ties)} of them tied" if plan.ties else ""
    result = (
        "every one is mapped once"
        if has_weights
        else "there are no weights to compare the names with"
    )
    output.print(
        f"{len(plan.tasks)} parameters, {len(plan.hf_names)} Hugging Face tensors{ties}: {result}"
    )
    for key, value in bridge.unread_keys.items():
        output.print(
            f"not read by transformers' model, carried along: {key}={value!r}", markup=False
        )
    for name in plan.unread:
        output.print(f"not loaded by transformers' model, carried along: {name}", markup=False)
    return 0
