# SPDX-License-Identifier: Apache-2.0
"""``megatron-bridge export``: Megatron to Hugging Face."""

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.bridge.checkpoint import paths
from megatron.bridge.cli.support import model_options
from megatron.bridge.utils.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
    """Return the tokenizer beside the checkpoint or of its run, or None if neither has a vocabulary."""
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
    )
    return 0
