# SPDX-License-Identifier: Apache-2.0
"""Hugging Face -> Megatron -> Hugging Face, every tensor compared bit for bit with the source.

``python hf_megatron_roundtrip.py --model-name ID [--output-dir DIR]``
"""

import sys
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

from megatron.bridge.cli.support import model_options, text_format
from megatron.bridge.cli.support.exit_code import exit_code
from megatron.bridge.cli.support.options import add_parallel_sizes
from megatron.bridge.cli.support.parser import Parser


def main(argv: Sequence[str]) -> int:
    """Convert the model there and back; the exit code is 1 if a tensor differs."""
    parser = Parser(
        description="Compare every tensor of a model after a round trip through Megatron, bit for bit."
    )
    parser.add_argument(
        "--hf-model",
        "--model-name",
        "--hf-model-id",
        required=True,
        metavar="ID",
        help="model directory or hub id",
    )
    add_parallel_sizes(parser)
    parser.add_argument(
        "--output-dir", type=Path, help="also write the Hugging Face model to this directory"
    )
    args = parser.parse_args(argv)

    from megatron.bridge import AutoBridge

    sizes = model_options.parallel_sizes(args)
    bridge = AutoBridge.from_hf_pretrained(args.hf_model, trust_remote_code=args.trust_remote_code)
    model = model_options.build_model(bridge, sizes)
    if args.output_dir:
        bridge.save_hf_pretrained(model, args.output_dir)
    return compare(bridge, model, args.hf_model)


def compare(bridge: Any, model: Any, name: str) -> int:
    """Print a table of all tensors and return the exit code."""
    from rich.table import Column, Table

    from megatron.bridge.models.conversion.check.certificate import prove
    from megatron.bridge.utils.console import console

    weights = bridge.export_hf_weights(model, cpu=True, show_progress=False)
    proofs, _ = prove(weights, bridge.hf_pretrained.state)
    table = Table(Column("tensor", overflow="fold"), "shape", "dtype", "bitwise equal", title=name)
    for tensor, proof in proofs.items():
        table.add_row(
            tensor, text_format.shape(proof.shape), proof.dtype, "yes" if proof.equal else "NO"
        )
    different = [tensor for tensor, proof in proofs.items() if not proof.equal]
    numbers = sum(prod(proof.shape) for proof in proofs.values())
    console().print(table)
    if different:
        console().print(
            f"{len(different)} of {table.row_count} tensors differ; the first is {different[0]}"
        )
        return 1
    console().print(f"{table.row_count} tensors, {numbers:,} numbers: all bitwise equal")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(lambda: main(sys.argv[1:])))
