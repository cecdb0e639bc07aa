# SPDX-License-Identifier: Apache-2.0
"""``megatron-bridge data``: prepare what a run trains on."""

import argparse
import os
from pathlib import Path

EXAMPLE = """example:
  megatron-bridge data preprocess --input corpus.jsonl --tokenizer-model HuggingFaceTB/SmolLM2-135M \\
      --output-prefix data/corpus --append-eod
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add ``data`` and its subcommands."""
    parser = subparsers.add_parser("data", help="prepare data", description="Prepare what a run trains on.")
    commands = parser.add_subparsers(dest="data_command", required=True, metavar="COMMAND")
    _add_preprocess_arguments(
        commands.add_parser(
            "preprocess",
            help="tokenise text into an indexed dataset",
            description="Tokenise JSONL or plain text into Megatron-Core's indexed format (.bin and .idx).",
            epilog=EXAMPLE,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
    )
    parser.set_defaults(run=run)


def _add_preprocess_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``preprocess``; names follow Megatron's tool where it has them."""
    parser.add_argument(
        "--input", nargs="+", type=Path, required=True, metavar="FILE", help="input files, in order"
    )
    parser.add_argument("--output-prefix", type=Path, required=True, help="output path without .bin and .idx")
    parser.add_argument("--tokenizer-model", required=True, help="directory or hub id of a Hugging Face tokenizer")
    parser.add_argument("--json-key", default="text", help="key of the text in a JSONL line (default: text)")
    parser.add_argument("--format", choices=("jsonl", "text"), help="format of the input (default: by file name)")
    parser.add_argument(
        "--text-document",
        choices=("file", "line"),
        default="file",
        help="what a document is in plain text (default: the whole file)",
    )
    parser.add_argument(
        "--append-eod", action="store_true", help="end each document with the end-of-sequence token"
    )
    parser.add_argument(
        "--add-special-tokens", action="store_true", help="let the tokenizer add its special tokens, such as BOS"
    )
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count() or 1, help="worker processes (default: all cores)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing output")
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="allow a tokenizer with Python code of its own"
    )


def run(args: argparse.Namespace) -> int:
    """Run the chosen subcommand."""
    return _run_preprocess(args)


def _run_preprocess(args: argparse.Namespace) -> int:
    """Tokenise, then say what came out."""
    from megatron.bridge.data.preprocess import PreprocessConfig, preprocess
    from megatron.bridge.utils.console import console

    report = preprocess(
        PreprocessConfig(
            inputs=args.input,
            output_prefix=args.output_prefix,
            tokenizer_model=args.tokenizer_model,
            json_key=args.json_key,
            format=args.format,
            text_document=args.text_document,
            append_eod=args.append_eod,
            add_special_tokens=args.add_special_tokens,
            workers=args.workers,
            overwrite=args.overwrite,
            trust_remote_code=args.trust_remote_code,
        )
    )
    console().print(f"{args.output_prefix}.bin and .idx: {report.summary()}")
    return 0
