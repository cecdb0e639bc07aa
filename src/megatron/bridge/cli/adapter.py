# SPDX-License-Identifier: Apache-2.0
"""``megatron-bridge adapter``: merge adapters, subtract them again, or write them for the peft library."""

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron.bridge.checkpoint import paths
from megatron.bridge.cli.support.options import (
    DTYPES,
    add_quantization,
    add_trust_checkpoint,
    add_trust_remote_code,
)
from megatron.bridge.cli.support.parser import Parser, location, location_path
from megatron.bridge.models.hf_pretrained import hub
from megatron.bridge.utils.console import console
from megatron.bridge.utils.errors import UserError

if TYPE_CHECKING:
    from megatron.bridge import AutoBridge


EXAMPLES = """examples:
  megatron-bridge adapter merge --adapter runs/lora --hf-path merged
  megatron-bridge adapter export --adapter runs/lora --hf-path adapter
  megatron-bridge adapter unmerge --adapter adapter --hf-model merged --hf-path base

--adapter is the folder of a run, one of its checkpoints, or a directory written by
the peft library.
"""
MERGE = "add the adapter to its base, in fp32, and write the sum as a Hugging Face model"
UNMERGE = "subtract the adapter from a merged model; the result is its base up to rounding"
EXPORT = "write the adapter of a run for peft.PeftModel.from_pretrained"


def add_arguments(parser: Parser) -> None:
    parser.description = (
        "Merge adapters into their base model, subtract them again, or write them for the peft "
        "library."
    )
    parser.epilog = EXAMPLES
    commands = parser.add_subparsers(dest="subcommand", required=True, metavar="COMMAND")

    merging = commands.add_parser("merge", help=MERGE, description=MERGE)
    merging.set_defaults(run_subcommand=merge)
    _add_adapter_and_base(merging)
    merging.add_argument(
        "--dtype",
        choices=DTYPES,
        help=(
            "dtype of the merged weights; float32 keeps even a small adapter (default: the base's)"
        ),
    )
    add_quantization(merging)

    unmerging = commands.add_parser("unmerge", help=UNMERGE, description=UNMERGE)
    unmerging.set_defaults(run_subcommand=unmerge)
    _add_adapter_and_base(unmerging, base_required=True, base="the merged model")

    exporting = commands.add_parser("export", help=EXPORT, description=EXPORT)
    exporting.set_defaults(run_subcommand=export)
    _add_adapter_and_base(exporting)


def _add_adapter_and_base(
    parser: argparse.ArgumentParser,
    base_required: bool = False,
    base: str = "Hugging Face base model (default: as the adapter names it)",
) -> None:
    parser.add_argument(
        "--adapter",
        type=location_path,
        required=True,
        metavar="DIR",
        help="run, checkpoint or peft directory",
    )
    parser.add_argument(
        "--hf-model", type=location, required=base_required, metavar="ID", help=base
    )
    parser.add_argument(
        "--hf-path", type=location_path, required=True, metavar="DIR", help="directory to create"
    )
    add_trust_remote_code(parser)
    add_trust_checkpoint(parser)


def run(args: argparse.Namespace) -> int:
    if not hub.is_peft_adapter(args.adapter):
        paths.resolve(args.adapter)  # before anything slow is imported
    args.run_subcommand(args)
    return 0


def merge(args: argparse.Namespace) -> None:
    from megatron.bridge.checkpoint import model_io
    from megatron.bridge.models.conversion.engine import side_files
    from megatron.bridge.models.hf_pretrained.causal_lm import to_dtype
    from megatron.bridge.peft import low_bit_base
    from megatron.bridge.peft.lora import rounding_loss

    bridge, model = _adapted(args)
    low_bit_base.restore(model)
    known = side_files.history_of(model, merge=True)
    if hub.is_peft_adapter(args.adapter):
        known = replace(known, chat_template=model_io.trained_template(args.adapter))
    else:
        known = side_files.history_of_checkpoint(args.adapter, adapters=known.adapters)
    if lost := rounding_loss(model, to_dtype(args.dtype)):
        console().print(
            f"rounding to {args.dtype or 'the dtype of the weights'} loses {lost:.1%} of the adapter's effect"
            + ("" if args.dtype else " (--dtype float32 loses nothing)")
        )
    if args.dtype == "float32":
        for chunk in model:
            chunk.float()  # before the sums, which are rounded to the dtype of their weights
    bridge.save_hf_pretrained(
        model,
        args.hf_path,
        weight_dtype=args.dtype,
        history=known,
        quantize=args.quantize,
        group_size=args.group_size,
        keep_high=args.keep_high,
    )


def export(args: argparse.Namespace) -> None:
    from megatron.bridge.checkpoint import model_io

    bridge, model = _adapted(args)
    template = model_io.trained_template(args.adapter)
    bridge.save_hf_adapter(model, args.hf_path, chat_template=template)


def unmerge(args: argparse.Namespace) -> None:
    from megatron.bridge.models.hf_pretrained.model_card import History
    from megatron.bridge.peft.lora import subtract

    bridge, model = _adapted(args, check_base=False)
    subtract(model)
    history = History(
        note="Adapters that had been merged into it were subtracted again, up to rounding."
    )
    bridge.save_hf_pretrained(model, args.hf_path, merge_adapter_weights=True, history=history)


def _adapted(args: argparse.Namespace, check_base: bool = True) -> "tuple[AutoBridge, list[Any]]":
    """The bridge and the model with its adapters; ``check_base`` requires that the model is their base."""
    from megatron.bridge.peft import checkpoint, hf_adapter

    source: Any = hf_adapter if hub.is_peft_adapter(args.adapter) else checkpoint
    name = args.hf_model or source.base_name(args.adapter)
    if not name:
        raise UserError(
            f"the adapter {args.adapter} does not name its base: give it with --hf-model"
        )
    return source.adapted_model(args.adapter, str(name), args.trust_remote_code, check=check_base)
