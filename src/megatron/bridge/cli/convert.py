# SPDX-License-Identifier: Apache-2.0
"""``megatron-bridge convert``: Hugging Face to Megatron."""

import argparse

from megatron.bridge.checkpoint import paths
from megatron.bridge.cli.support import model_options
from megatron.bridge.cli.support.options import (
    DTYPES,
    add_hf_model,
    add_no_adapter,
    add_no_progress,
    add_strip_prefix,
)
from megatron.bridge.cli.support.parser import Parser, location_path
from megatron.bridge.models.hf_pretrained import hub
from megatron.bridge.utils.console import console
from megatron.bridge.utils.errors import UserError

DESCRIPTION = (
    "Convert a Hugging Face model to a Megatron checkpoint, bit for bit. Only a few parameters "
    "are in memory at a time, so the model may be larger than the machine's memory."
)
EXAMPLES = r"""examples:
  megatron-bridge convert --hf-model HuggingFaceTB/SmolLM2-135M --megatron-path checkpoints/smollm2
  torchrun --nproc-per-node 2 --module megatron.bridge.cli.main convert --tp 2 \
      --hf-model HuggingFaceTB/SmolLM2-135M --megatron-path checkpoints/smollm2
"""


def add_arguments(parser: Parser) -> None:
    parser.description = DESCRIPTION
    parser.epilog = EXAMPLES
    parser.add_hidden_names({"--output-dir": "--megatron-path", "--torch-dtype": "--dtype"})
    add_hf_model(parser)
    add_no_adapter(parser)
    parser.add_argument(
        "--megatron-path",
        type=location_path,
        required=True,
        metavar="DIR",
        help="checkpoint directory to create",
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="dtype of the model (default: as in the checkpoint)",
    )
    add_strip_prefix(parser)
    add_no_progress(parser)


def run(args: argparse.Namespace) -> int:
    # before anything slow is imported
    hub.refuse_adapter_beside_weights(args.hf_model, ignored=args.adapter == "none")
    sizes = model_options.parallel_sizes(args)
    if hub.is_hf_model(args.megatron_path):
        raise UserError(
            f"--megatron-path {args.megatron_path} is a Hugging Face model: choose another folder"
        )
    paths.refuse_used(args.megatron_path)
    from megatron.bridge import AutoBridge

    bridge = AutoBridge.from_hf_pretrained(
        args.hf_model,
        trust_remote_code=args.trust_remote_code,
        dtype=args.dtype,
        strip_prefix=args.strip_prefix,
        adapter=args.adapter,
    )
    provider = bridge.to_megatron_provider(load_weights=False)
    model_options.set_parallel_sizes(provider, sizes)
    bridge.save_megatron_checkpoint(provider, args.megatron_path, not args.no_progress)
    console().print(f"Megatron checkpoint: {args.megatron_path}")
    return 0
