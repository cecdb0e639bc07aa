# SPDX-License-Identifier: Apache-2.0
"""``megatron-bridge export``: Megatron to Hugging Face."""

import argparse
from pathlib import Path

from megatron.bridge.cli import convert

EXAMPLE = """example:
  megatron-bridge export --hf-model HuggingFaceTB/SmolLM2-135M --megatron-path checkpoints/smollm2 \\
      --hf-path exported
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add ``export``."""
    parser = subparsers.add_parser(
        "export",
        help="Megatron -> Hugging Face",
        description="Convert a Megatron checkpoint to a complete Hugging Face model; what is not weights "
        "(tokenizer, chat template, ...) is taken from --hf-model. A few parameters are in memory at a time, so "
        "the model may be larger than the machine's memory.",
        epilog=EXAMPLE,
    )
    add_arguments(parser)
    parser.set_defaults(run=run)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what an export needs."""
    convert.add_model_arguments(parser)
    parser.add_argument(
        "--megatron-path", type=Path, required=True, help="checkpoint directory, or an iteration of it"
    )
    parser.add_argument("--hf-path", type=Path, required=True, help="model directory to make")
    parser.add_argument("--no-progress", action="store_true", help="draw no progress bar and print no summary")
    parser.add_argument(
        "--not-strict", action="store_true", help="export even if the tensors are not those of --hf-model"
    )


def run(args: argparse.Namespace) -> int:
    """Write the Hugging Face model."""
    from megatron.bridge import AutoBridge

    bridge = AutoBridge.from_hf_pretrained(args.hf_model, trust_remote_code=args.trust_remote_code)
    bridge.export_ckpt(
        args.megatron_path,
        args.hf_path,
        show_progress=not args.no_progress,
        strict=not args.not_strict,
        mp_overrides=convert.layout(args),
    )
    return 0
