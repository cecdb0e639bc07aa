# SPDX-License-Identifier: Apache-2.0
"""``megatron-bridge prune``: a smaller model from a trained one."""

import argparse
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.bridge.cli.support import text_format
from megatron.bridge.cli.support.options import add_new_model_folder, add_source_model
from megatron.bridge.cli.support.parser import Parser, count
from megatron.bridge.cli.support.texts import add_texts, token_ids

if TYPE_CHECKING:
    from torch import Tensor

DESCRIPTION = (
    "Make a smaller Hugging Face model from the layers and widths of a trained one that matter "
    "most for calibration texts (Minitron). Distill it from the trained model afterwards: `train "
    "--mode distill`."
)
EXAMPLES = """example:
  megatron-bridge prune --hf-model Qwen/Qwen3-0.6B --hf-path pruned --texts texts.jsonl --layers 20 \\
      --ffn-hidden-size 2304
"""


def add_arguments(parser: Parser) -> None:
    parser.description = DESCRIPTION
    parser.epilog = EXAMPLES
    add_source_model(parser, "directory or hub id of the trained model")
    add_new_model_folder(parser)
    parser.add_argument("--layers", type=count, metavar="N", help="layers to keep")
    parser.add_argument("--hidden-size", type=count, metavar="N", help="channels to keep")
    parser.add_argument(
        "--ffn-hidden-size", type=count, metavar="N", help="neurons of each MLP to keep"
    )
    parser.add_argument(
        "--key-heads",
        type=count,
        metavar="N",
        help="key heads of each layer to keep, with their query heads",
    )
    add_texts(parser, samples=1024, length=1024)


def run(args: argparse.Namespace) -> int:
    from megatron.bridge.models.hf_pretrained.causal_lm import PreTrainedCausalLM
    from megatron.bridge.models.surgery.pruning import PrunedSizes, prune

    sizes = PrunedSizes(args.layers, args.hidden_size, args.ffn_hidden_size, args.key_heads)
    source = PreTrainedCausalLM(args.hf_model)
    batches = _batches(source.tokenizer, args.texts, args.samples, args.seq_length)
    kept_parts = prune(source, args.hf_path, sizes, batches)
    layers = ", ".join(map(str, kept_parts.layers))
    text_format.say(f"{args.hf_path}: keeps the layers {layers}, counted from 0")
    return 0


def _batches(tokenizer: Any, path: Path, samples: int, length: int) -> "Iterator[Tensor]":
    """Yield the token ids of each text, [1, up to ``length`` tokens]."""
    import torch

    for ids in islice(token_ids(tokenizer, path, length), samples):
        yield torch.tensor([ids])
