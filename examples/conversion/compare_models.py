# SPDX-License-Identifier: Apache-2.0
"""Run a model in transformers and in Megatron and compare the logits.

``python compare_models.py --hf-model ID [--megatron-path DIR] [--prompt TEXT] [--image-path FILE ...]``
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.bridge.cli.support import logits, model_options
from megatron.bridge.cli.support.exit_code import exit_code
from megatron.bridge.cli.support.options import add_parallel_sizes
from megatron.bridge.cli.support.parser import Parser

if TYPE_CHECKING:
    from torch import Tensor

    from megatron.bridge.models.conversion.check.compare_logits import LogitComparison


def main(argv: Sequence[str]) -> int:
    """Compare the models; the exit code is 1 if they differ by more than the tolerance."""
    args = parsed(argv)

    from megatron.bridge import AutoBridge
    from megatron.bridge.models.conversion.check import compare_logits

    sizes = model_options.parallel_sizes(args)
    bridge = AutoBridge.from_hf_pretrained(
        args.hf_model, trust_remote_code=args.trust_remote_code, dtype=args.dtype
    )
    ids, tokenizer, extra, hf_extra = inputs(bridge, args)
    model = megatron_model(bridge, sizes, args)
    found = compare_logits.run_megatron(model, ids, **extra)
    reference, report, tolerance = logits.judged(bridge, ids, found, args.tolerance, hf_extra)
    print_next_tokens(reference.logits[0, -1], found.logits[0, -1], tokenizer)
    return print_report(report, tolerance, tokenizer)


def inputs(
    bridge: Any, args: argparse.Namespace
) -> tuple["Tensor", Any, dict[str, Any], dict[str, Any]]:
    """Token ids, tokenizer, and what both models take beside them."""
    if not args.image_path:
        return *logits.tokens(bridge, args.prompt), {}, {}
    return about_images(
        bridge.hf_pretrained.directory, args.image_path, args.prompt or "Describe this image."
    )


def about_images(
    folder: str | Path, images: Sequence[str], question: str
) -> tuple["Tensor", Any, dict[str, Any], dict[str, Any]]:
    """What ``inputs`` returns, of a question about images."""
    import torch

    from megatron.bridge.data.media.media_rules import MediaRules
    from megatron.bridge.data.media.processing import BY_SAMPLE
    from megatron.bridge.data.tokenizer import load_hf_tokenizer
    from megatron.bridge.inference.prompts import PromptReader, as_messages

    reader = PromptReader(load_hf_tokenizer(str(folder)), media=MediaRules(str(folder), "/"))
    tokens: Any = reader.tokens(as_messages(question, images), "--prompt")
    pixels, ids = reader.pixels(tokens.images.references), torch.tensor([tokens])
    positions = tokens.images.positions
    extra = {} if positions is None else {"position_ids": torch.from_numpy(positions)[:, None]}
    kinds = (torch.from_numpy(tokens.images.rows)[None] >= 0).long()
    if (
        reader.processor.kind == "paligemma"
    ):  # all of the prompt sees all of it, which is kind 0 in transformers
        kinds = torch.zeros_like(ids)
        extra["attention_mask"] = ids.shape[1] - 1 - torch.arange(ids.shape[1])[None]
    # a model of transformers takes one of the kinds of tokens, or none
    hf_pixels = (
        {name: it[None] for name, it in pixels.items()}
        if reader.processor.kind in BY_SAMPLE
        else pixels
    )
    hf_extra = {**hf_pixels, "mm_token_type_ids": kinds, "token_type_ids": kinds}
    return ids, reader.hf, {"media": pixels, **extra}, hf_extra


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    """Read the options."""
    parser = Parser(
        description="Compare the logits of transformers and of Megatron; where they differ, name the layer from "
        "which on they do."
    )
    parser.add_argument(
        "--hf-model",
        "--hf-model-path",
        "--model-name",
        required=True,
        metavar="ID",
        help="model directory or hub id",
    )
    add_parallel_sizes(parser)
    parser.add_argument(
        "--megatron-path", type=Path, help="take Megatron's weights from this checkpoint instead"
    )
    parser.add_argument(
        "--prompt", help="text to run (default: a sentence, or random tokens without a tokenizer)"
    )
    parser.add_argument(
        "--image-path",
        "--image_path",
        action="append",
        help="image that the prompt is about; may be repeated",
    )
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        default="float32",
        help="dtype of both models",
    )
    parser.add_argument(
        "--tolerance", type=float, help="largest difference over the logits' standard deviation"
    )
    return parser.parse_args(argv)


def megatron_model(bridge: Any, sizes: dict[str, Any], args: argparse.Namespace) -> list[Any]:
    """The Megatron model, from the Hugging Face weights or from a checkpoint."""
    if args.megatron_path:
        precision = {"bf16": args.dtype == "bfloat16", "fp16": args.dtype == "float16"}
        model = bridge.load_megatron_model(
            args.megatron_path, mp_overrides=sizes, wrap_with_ddp=False, **precision
        )
    else:
        model = model_options.build_model(bridge, sizes)
    for chunk in model:
        chunk.eval()
    return model


def print_next_tokens(reference: "Tensor", found: "Tensor", tokenizer: Any) -> None:
    """Print the most likely next tokens with both logits."""
    from rich.table import Table

    from megatron.bridge.utils.console import console

    table = Table(
        "next token", "Hugging Face", "Megatron", "difference", title="logits at the last position"
    )
    for token in reference.float().topk(5).indices.tolist():
        values = float(reference[token]), float(found[token])
        table.add_row(
            named(token, tokenizer), *(f"{value:.5f}" for value in (*values, values[1] - values[0]))
        )
    console().print(table)


def print_report(report: "LogitComparison", tolerance: float, tokenizer: Any) -> int:
    """Print the largest difference and, if it is beyond the tolerance, the layers; return the exit code."""
    from rich.table import Table

    from megatron.bridge.utils.console import console

    terminal = console()
    row, position, token = report.worst
    terminal.print(
        f"largest difference {report.largest:.3g}, {report.relative:.3g} of the standard deviation "
        f"{report.scale:.3g}: row {row}, position {position}, token {named(token, tokenizer)}, "
        f"{report.pair[0]:.5f} and {report.pair[1]:.5f}"
    )
    terminal.print(
        f"smallest cosine similarity {report.cosine:.7f}; same next token at {report.same_choice:.1%} of positions"
    )
    if report.relative <= tolerance:
        terminal.print(f"the models agree (tolerance {tolerance:g})")
        return 0
    layers = Table(
        "output of", "largest difference / standard deviation", title="differences by layer"
    )
    for name, value in report.layers.items():
        layers.add_row(name, f"{value:.3g}")
    terminal.print(layers)
    terminal.print(f"the models differ (tolerance {tolerance:g})")
    return 1


def named(token: int, tokenizer: Any) -> str:
    """A token id with its text."""
    return f"{token} {tokenizer.decode([token])!r}" if tokenizer else str(token)


if __name__ == "__main__":
    sys.exit(exit_code(lambda: main(sys.argv[1:])))
