# SPDX-License-Identifier: Apache-2.0
"""``megatron-bridge calibrate``: a quantized model that is calibrated on the user's texts."""

import argparse
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.bridge.checkpoint import paths
from megatron.bridge.cli.support import text_format
from megatron.bridge.cli.support.options import add_new_model_folder, add_source_model
from megatron.bridge.cli.support.parser import Parser, count, location_path
from megatron.bridge.cli.support.texts import add_texts, token_ids
from megatron.bridge.utils.console import console
from megatron.bridge.utils.errors import UserError

if TYPE_CHECKING:
    from megatron.bridge.models.hf_pretrained.causal_lm import PreTrainedCausalLM
    from megatron.bridge.models.surgery.calibration import CalibrationReport

DESCRIPTION = (
    "Quantize a model with llm-compressor, calibrated on texts of yours, and measure the loss that "
    "this costs on other texts. The result is in the format compressed-tensors, which vLLM, "
    "transformers and this project read. `export` rounds to nearest, for which it needs no texts."
)
EXAMPLES = """examples:
  megatron-bridge calibrate --hf-model Qwen/Qwen3-0.6B --hf-path quantized --texts texts.jsonl \\
      --scheme W4A16 --method gptq --python compressor/bin/python
  megatron-bridge calibrate --hf-model Qwen/Qwen3-0.6B --megatron-path runs/sft --hf-path quantized \\
      --texts chats.jsonl --scheme NVFP4 --method observe --python compressor/bin/python
"""
_SHOWN = 5
# as in SCHEMES and METHODS of models.surgery.calibration, which imports torch
_SCHEMES = (
    "W4A16, W4A16_ASYM, W8A16, NVFP4A16, MXFP4A16 (weights); W8A8, FP8, FP8_DYNAMIC, FP8_BLOCK, "
    "NVFP4, MXFP4, MXFP8 (weights and activations)"
)
_METHODS = ("gptq", "awq", "observe")


def add_arguments(parser: Parser) -> None:
    parser.description = DESCRIPTION
    parser.epilog = EXAMPLES
    add_source_model(parser, "directory or hub id of the model in full")
    parser.add_argument(
        "--megatron-path",
        type=location_path,
        metavar="DIR",
        help="quantize the weights of this Megatron checkpoint instead of those of --hf-model",
    )
    add_new_model_folder(parser)
    add_texts(parser, samples=512, length=2048)
    parser.add_argument(
        "--held-out",
        type=count,
        default=64,
        metavar="N",
        help="texts after --samples on which the loss is measured (default: %(default)s)",
    )
    parser.add_argument(
        "--scheme", required=True, metavar="NAME", help=f"of compressed-tensors: {_SCHEMES}"
    )
    parser.add_argument(
        "--method",
        choices=_METHODS,
        default="gptq",
        help=(
            "gptq: moves the errors of a weight into the next ones; awq: scales up the channels "
            "with large activations before rounding; observe: rounds to nearest, and observes "
            "activations (default: %(default)s)"
        ),
    )
    parser.add_argument(
        "--keep-high",
        nargs="+",
        default=[],
        metavar="PATTERN",
        help="Hugging Face names that stay in full, such as '*.0.mlp.*'",
    )
    parser.add_argument(
        "--python",
        default=sys.executable,
        metavar="FILE",
        help="interpreter of an environment with llm-compressor (default: this one)",
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace the weights that an earlier call wrote to --hf-path",
    )


def run(args: argparse.Namespace) -> int:
    if args.megatron_path is not None:
        paths.resolve(args.megatron_path)  # before anything slow is imported
    from megatron.bridge.models.hf_pretrained.causal_lm import PreTrainedCausalLM
    from megatron.bridge.models.surgery.calibration import SCHEMES, CalibrationPlan, calibrate

    if args.scheme not in SCHEMES:
        raise UserError(
            f"--scheme {args.scheme} is not one of {', '.join(SCHEMES)}: use one of them"
        )
    plan = CalibrationPlan(args.method, args.scheme, tuple(args.keep_high), args.python)
    with _source_folder(args.hf_model, args.megatron_path) as folder:
        source = PreTrainedCausalLM(folder)
        texts = _read_texts(source, args)
        calibration, held_out = _split(texts, args.samples, args.held_out, args.texts)
        console().print(
            f"calibrating {args.scheme} by {args.method} on {len(calibration)} texts of "
            f"{sum(map(len, calibration)):,} tokens"
        )
        report = calibrate(source, args.hf_path, plan, calibration, held_out, args.overwrite)
    _print_report(report, args.hf_path)
    return 0


@contextmanager
def _source_folder(hf_model: str, checkpoint: Path | None) -> Generator[str]:
    """Yield the model in full: ``hf_model`` itself, or an export of a checkpoint."""
    if checkpoint is None:
        yield hf_model
        return
    from megatron.bridge import AutoBridge

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, checkpoint.resolve().name)
        AutoBridge.from_hf_pretrained(hf_model).export_ckpt(checkpoint, folder, show_progress=False)
        yield str(folder)


def _read_texts(source: "PreTrainedCausalLM", args: argparse.Namespace) -> list[list[int]]:
    """Return the token ids of the texts that have something to predict."""
    texts = token_ids(source.tokenizer, args.texts, args.seq_length)
    long_enough = (ids for ids in texts if len(ids) > 1)
    return list(islice(long_enough, args.samples + args.held_out))


def _split(
    texts: list[list[int]], samples: int, held_out: int, path: Path
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the texts to calibrate on and the held-out ones, which come last: a tenth, if there are few."""
    if len(texts) < 2:
        raise UserError(
            f"--texts {path} has {len(texts)} texts of two tokens or more: give at least 2, one to calibrate on and "
            "one to measure"
        )
    has_all = len(texts) >= samples + held_out
    last = held_out if has_all else min(held_out, max(1, len(texts) // 10))
    return texts[:-last][:samples], texts[-last:]


def _print_report(report: "CalibrationReport", folder: Path) -> None:
    losses = report.losses
    console().print(
        f"loss of {report.held_out_tokens:,} held-out tokens: {losses['in full']:.4f} in full, "
        f"{losses['calibrated']:.4f} with these weights"
    )
    if report.in_full:
        shown = ", ".join(report.in_full[:_SHOWN])
        more = f" and {len(report.in_full) - _SHOWN} more" if len(report.in_full) > _SHOWN else ""
        console().print(f"{len(report.in_full)} other matrices stay in full: {shown}{more}")
    text_format.say(f"{folder}: {report.quantized} matrices quantized")
