# SPDX-License-Identifier: Apache-2.0
"""``megatron-bridge adapter``: adapters into their base and out of it again, and into the format of ``peft``."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.bridge.utils.errors import UserError

if TYPE_CHECKING:
    from megatron.bridge import AutoBridge

EXAMPLE = """examples:
  megatron-bridge adapter merge --adapter runs/lora --hf-path merged
  megatron-bridge adapter export --adapter runs/lora --hf-path adapter
  megatron-bridge adapter unmerge --adapter adapter --hf-model merged --hf-path base

--adapter is the folder of a run, one of its checkpoints, or a directory that the
peft library wrote.
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add ``adapter`` and what it can do."""
    parser = subparsers.add_parser(
        "adapter",
        help="merge adapters into their base, take them out again, or write them for peft",
        description="Merge adapters into their base, take them out again, or write them for the peft library.",
        epilog=EXAMPLE,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for action, text in (
        (merge, "base and adapter -> Hugging Face model, summed in fp32"),
        (unmerge, "merged model and adapter -> Hugging Face model of the base, up to rounding"),
        (export, "adapter of a run -> directory for peft.PeftModel.from_pretrained"),
    ):
        command = commands.add_parser(action.__name__, help=text, description=text)
        command.add_argument("--adapter", type=Path, required=True, help="run, checkpoint or peft directory")
        command.add_argument(
            "--hf-model",
            required=action is unmerge,
            help="the merged model"
            if action is unmerge
            else "Hugging Face base (default: as the adapter names it)",
        )
        command.add_argument("--hf-path", type=Path, required=True, help="directory to make")
        command.add_argument("--trust-remote-code", action="store_true", help="run the model's own code")
        command.set_defaults(run=run, action=action)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Do what was asked for."""
    args.action(args)
    return 0


def merge(args: argparse.Namespace) -> None:
    """Write the base with the adapters in its weights."""
    from megatron.bridge.models.conversion import side_files

    bridge, model = _adapted(args)
    known = side_files.history_of(model, merge=True)
    if not _in_peft_format(args.adapter):
        known = side_files.history_of_checkpoint(args.adapter, adapters=known.adapters)
    bridge.save_hf_pretrained(model, args.hf_path, history=known)


def export(args: argparse.Namespace) -> None:
    """Write the adapters alone."""
    bridge, model = _adapted(args)
    bridge.save_hf_adapter(model, args.hf_path)


def unmerge(args: argparse.Namespace) -> None:
    """Subtract the adapters from the weights of a merged model."""
    from megatron.bridge.models.hf_pretrained.model_card import History
    from megatron.bridge.peft.unmerge import subtract

    bridge, model = _adapted(args, of_base=False)
    subtract(model)
    history = History(note="Adapters that had been merged into it were taken out again, up to rounding.")
    bridge.save_hf_pretrained(model, args.hf_path, merge_adapter_weights=True, history=history)


def _adapted(args: argparse.Namespace, of_base: bool = True) -> "tuple[AutoBridge, list[Any]]":
    """The bridge and the model with the adapters on it; without ``of_base`` it is not their base."""
    from megatron.bridge.peft import hf_adapter
    from megatron.bridge.training import adapter_checkpoint

    place: Any = hf_adapter if _in_peft_format(args.adapter) else adapter_checkpoint
    name = args.hf_model or place.base_name(args.adapter)
    if not name:
        raise UserError(f"the adapter {args.adapter} does not name its base: give it with --hf-model")
    return place.adapted_model(args.adapter, str(name), args.trust_remote_code, check=of_base)


def _in_peft_format(path: Path) -> bool:
    return (path / "adapter_config.json").is_file()
