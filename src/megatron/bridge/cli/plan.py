# SPDX-License-Identifier: Apache-2.0
"""``megatron-bridge plan``: which tensor becomes which parameter, without reading weights."""

import argparse
import re
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from megatron.bridge.cli.support import model_options, text_format
from megatron.bridge.cli.support.options import add_hf_model
from megatron.bridge.cli.support.parser import Parser
from megatron.bridge.models.hf_pretrained import hub
from megatron.bridge.utils.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from megatron.bridge.models.conversion.engine.plan import WeightConversionTask
    from megatron.bridge.models.conversion.model_bridge import DecoderBridge

_NUMBER = re.compile(
    r"(?<=\.)\d+(?=\.)|(?<=\.weight)\d+$|(?<=\.bias)\d+$"
)  # of a layer or an expert


DESCRIPTION = (
    "Print the conversion plan of a model: which Hugging Face tensors become which Megatron "
    "parameter, and how it is split. No weights are read, and the model is built without memory. "
    "With --family, print what an architecture's bridge declares instead: its config keys and its "
    "tensors."
)


def add_arguments(parser: Parser) -> None:
    parser.description = DESCRIPTION
    add_hf_model(parser, required=False)
    parser.add_argument(
        "--family",
        metavar="NAME",
        help=(
            "print the map of an architecture or of a family, such as LlamaForCausalLM or llama; "
            "needs no model"
        ),
    )
    parser.add_argument(
        "--full",
        action="store_true",
        help="one line per parameter, not per kind of parameter",
    )


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


def print_family(name: str) -> int:
    """Print the config keys and the tensors of the architectures that a family's module declares.

    Args:
        name: an architecture, such as ``LlamaForCausalLM``, or the folder of a family, such as ``llama``.

    Raises:
        UserError: there is no such architecture or family.
    """
    from megatron.bridge.models.conversion import model_bridge

    declared = model_bridge.declared_bridges()
    family_of = {
        architecture: bridge.__module__.split(".")[3] for architecture, bridge in declared.items()
    }
    chosen = (
        [name] if name in declared else [a for a, family in family_of.items() if family == name]
    )
    if not chosen:
        known = sorted({*declared, *family_of.values()})
        raise UserError(f"--family {name} is not known{did_you_mean(name, known)}")
    text_format.say("\n\n".join(_describe_bridge(declared[a], a) for a in chosen))
    return 0


def _describe_bridge(bridge: "type[DecoderBridge]", architecture: str) -> str:
    keys = [
        (field.hf, ", ".join(field.names) or "(checked, or read by other keys)")
        for field in bridge.fields
    ]
    fixed = [
        ("(implied)", f"{name} = {getattr(value, '__name__', value)}")
        for name, value in bridge.fixed.items()
    ]
    # a bridge of a vision-language model leaves its decoder to the bridge of a text model
    keys += [
        (f"text_config of {kind}", text) for kind, text in getattr(bridge, "texts", {}).items()
    ]
    width = max(len(key) for key, _ in (*keys, *fixed))
    lines = [f"{key:<{width}}  {names}" for key, names in (*keys, *fixed)]
    summary = (bridge.__doc__ or "").strip().partition("\n")[0]
    return "\n".join(
        [
            f"{architecture}: {summary}",
            "",
            "Config keys and the provider's settings:",
            *lines,
            "",
            "Megatron parameters, mappings and Hugging Face tensors:",
            bridge().mapping_registry().describe(),
        ]
    )


def run(args: argparse.Namespace) -> int:
    if args.family:
        return print_family(args.family)
    if not args.hf_model:
        raise UserError("plan needs a model or a family: give --hf-model DIR or --family NAME")
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
