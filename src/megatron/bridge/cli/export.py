# SPDX-License-Identifier: Apache-2.0
"""``megatron-bridge export``: Megatron to Hugging Face."""

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.bridge.checkpoint import paths
from megatron.bridge.cli.support import model_options
from megatron.bridge.cli.support.options import (
    DTYPES,
    add_hf_model,
    add_no_progress,
    add_quantization,
    add_strip_prefix,
    add_trust_checkpoint,
)
from megatron.bridge.cli.support.parser import Parser, location_path
from megatron.bridge.utils.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


DESCRIPTION = (
    "Convert a Megatron checkpoint to a complete Hugging Face model. The other files (tokenizer, "
    "chat template, ...) come from --hf-model; a model that was trained from scratch needs none. "
    "Only a few parameters are in memory at a time, so the model may be larger than the machine's "
    "memory."
)
EXAMPLES = r"""examples:
  megatron-bridge export --hf-model HuggingFaceTB/SmolLM2-135M --megatron-path checkpoints/smollm2 \
      --hf-path exported
  megatron-bridge export --megatron-path runs/pretrain --hf-path exported
"""


def add_arguments(parser: Parser) -> None:
    parser.description = DESCRIPTION
    parser.epilog = EXAMPLES
    parser.add_hidden_names({"--output-dir": "--hf-path", "--torch-dtype": "--dtype"})
    add_hf_model(
        parser,
        required=False,
        description=(
            "model directory or hub id (without it, config and tokenizer are made from the "
            "Megatron checkpoint)"
        ),
    )
    parser.add_argument(
        "--architecture",
        metavar="NAME",
        help=(
            "without --hf-model: the transformers class, such as LlamaForCausalLM (default: the "
            "only class with the same computation)"
        ),
    )
    add_trust_checkpoint(parser)
    parser.add_argument(
        "--megatron-path",
        type=location_path,
        required=True,
        metavar="DIR",
        help="checkpoint directory, or one iteration in it",
    )
    parser.add_argument(
        "--hf-path",
        type=location_path,
        required=True,
        metavar="DIR",
        help="model directory to create",
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help=(
            "dtype of the weights to write (default: as in --hf-model, to which weights of a "
            "float32 run are rounded)"
        ),
    )
    add_quantization(parser)
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace the weights that an earlier export wrote to --hf-path",
    )
    add_no_progress(parser, "show no progress bar and no summary")
    add_strip_prefix(parser)
    parser.add_argument(
        "--not-strict",
        action="store_true",
        help="export even if the tensors do not match --hf-model's",
    )


def run(args: argparse.Namespace) -> int:
    paths.resolve(args.megatron_path)  # before anything slow is imported
    if args.hf_model is not None:
        if args.architecture is not None:
            raise UserError(
                f"--architecture {args.architecture} cannot be used with --hf-model, which names it: leave one out"
            )
        return _export(args, args.hf_model)
    from megatron.bridge.models.conversion.describe import write_description

    tokenizer = _tokenizer_of(args.megatron_path)
    with tempfile.TemporaryDirectory() as folder:
        described = Path(folder, args.megatron_path.resolve().name)
        described.mkdir()
        write_description(args.megatron_path, described, args.architecture, tokenizer)
        return _export(args, str(described))


def _tokenizer_of(checkpoint: Path) -> "PreTrainedTokenizerBase | None":
    """Return the tokenizer next to the checkpoint or of its run, or None if neither has a vocabulary."""
    from megatron.bridge.checkpoint import model_io
    from megatron.bridge.data.tokenizer import load_hf_tokenizer
    from megatron.bridge.models.conversion.pretrained import tokenizer_of

    of_run = model_io.read_run_config(checkpoint).get("tokenizer") or {}
    name = tokenizer_of(checkpoint) or of_run.get("tokenizer_model")
    return None if name is None else load_hf_tokenizer(name)


def _export(args: argparse.Namespace, hf_model: str) -> int:
    from megatron.bridge import AutoBridge

    bridge = AutoBridge.from_hf_pretrained(
        hf_model,
        trust_remote_code=args.trust_remote_code,
        strip_prefix=args.strip_prefix,
    )
    bridge.export_ckpt(
        args.megatron_path,
        args.hf_path,
        show_progress=not args.no_progress,
        strict=not args.not_strict,
        mp_overrides=model_options.parallel_sizes(args),
        overwrite=args.overwrite,
        weight_dtype=args.dtype,
        quantize=args.quantize,
        group_size=args.group_size,
        keep_high=args.keep_high,
    )
    return 0
