# SPDX-License-Identifier: Apache-2.0
"""``megatron-bridge export``: Megatron to Hugging Face."""

import argparse
from pathlib import Path

from megatron.bridge.cli.support import model_options

DESCRIPTION = (
    "Convert a Megatron checkpoint to a complete Hugging Face model. The other files (tokenizer, chat template, "
    "...) come from --hf-model. Only a few parameters are in memory at a time, so the model may be larger than "
    "the machine's memory."
)
EXAMPLES = """example:
  megatron-bridge export --hf-model HuggingFaceTB/SmolLM2-135M --megatron-path checkpoints/smollm2 \\
      --hf-path exported
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    model_options.add_model_arguments(parser)
    model_options.add_trust_checkpoint(parser)
    parser.add_argument(
        "--megatron-path", type=Path, required=True, help="checkpoint directory, or one iteration in it"
    )
    parser.add_argument("--hf-path", type=Path, required=True, help="model directory to create")
    parser.add_argument("--no-progress", action="store_true", help="show no progress bar and no summary")
    parser.add_argument(
        "--not-strict", action="store_true", help="export even if the tensors are not those of --hf-model"
    )


def run(args: argparse.Namespace) -> int:
    from megatron.bridge import AutoBridge

    bridge = AutoBridge.from_hf_pretrained(args.hf_model, trust_remote_code=args.trust_remote_code)
    bridge.export_ckpt(
        args.megatron_path,
        args.hf_path,
        show_progress=not args.no_progress,
        strict=not args.not_strict,
        mp_overrides=model_options.parallel_sizes(args),
    )
    return 0
