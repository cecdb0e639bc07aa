# SPDX-License-Identifier: Apache-2.0
"""``megatron-bridge convert``: Hugging Face to Megatron."""

import argparse
from pathlib import Path

from megatron.bridge.cli.support import model_options
from megatron.bridge.utils.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    model_options.add_model_arguments(parser)
    parser.add_argument(
        "--megatron-path", "--output-dir", type=Path, required=True, help="checkpoint directory to create"
    )
    parser.add_argument(
        "--dtype",
        "--torch-dtype",
        choices=model_options.DTYPES,
        help="dtype of the model (default: as in the checkpoint)",
    )
    parser.add_argument("--no-progress", action="store_true", help="show no progress bar")


def run(args: argparse.Namespace) -> int:
    from megatron.bridge import AutoBridge
    from megatron.bridge.models.hf_pretrained.hub import is_hf_model
    from megatron.bridge.utils.console import console

    sizes = model_options.parallel_sizes(args)
    if is_hf_model(args.megatron_path):
        raise UserError(f"--megatron-path {args.megatron_path} is a Hugging Face model: choose another folder")
    bridge = AutoBridge.from_hf_pretrained(args.hf_model, trust_remote_code=args.trust_remote_code, dtype=args.dtype)
    provider = bridge.to_megatron_provider(load_weights=False)
    model_options.set_parallel_sizes(provider, sizes)
    bridge.save_megatron_checkpoint(provider, args.megatron_path, not args.no_progress)
    console().print(f"Megatron checkpoint: {args.megatron_path}")
    return 0
