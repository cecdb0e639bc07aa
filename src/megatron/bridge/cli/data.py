# SPDX-License-Identifier: Apache-2.0
"""``megatron-bridge data``: prepare what a run trains on, and look at it."""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.bridge.cli import words
from megatron.bridge.utils.errors import UserError

if TYPE_CHECKING:
    from megatron.bridge.data.tokenizer import Tokenizer
    from megatron.bridge.training.config import ConfigContainer

EXAMPLE = """example:
  megatron-bridge data preprocess --input corpus.jsonl --tokenizer-model HuggingFaceTB/SmolLM2-135M \\
      --output-prefix data/corpus --append-eod
"""
PREVIEW_EXAMPLE = """example:
  megatron-bridge data preview llama32_1b_finetune_config --data chats --html preview.html \\
      dataset.train_on=last train.micro_batch_size=2
"""
PREPARE_EXAMPLE = """example:
  megatron-bridge data prepare llama32_1b_finetune_config --data chats dataset.prepared_dir=prepared \\
      dataset.workers=8
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
        )
    )
    _add_preview_arguments(
        commands.add_parser(
            "preview",
            help="show what a run is going to learn from",
            description="Show samples with what is learnt of them, counts, lengths, packing and first batches.",
            epilog=PREVIEW_EXAMPLE,
        )
    )
    _add_config_arguments(
        commands.add_parser(
            "prepare",
            help="tokenise the records of a run once, for later runs",
            description="Tokenise the records of a run into dataset.prepared_dir; an interrupted prepare goes on.",
            epilog=PREPARE_EXAMPLE,
        )
    )
    parser.set_defaults(run=run)


def _count(text: str) -> int:
    """A number from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no number from 1")
    return int(text)


def _add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Which config to read."""
    parser.add_argument("source", metavar="CONFIG", help="YAML file with a whole config, or a recipe's name")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="settings to change, in YAML")
    parser.add_argument("--data", metavar="DIR", help="folder of the data, for a recipe")
    parser.add_argument("--hf-model", metavar="ID", help="model to train instead of the recipe's")
    parser.add_argument(
        "--world-size", type=_count, metavar="N", help="processes of the run (default: the recipe's, or 1)"
    )


def _add_preview_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``preview``."""
    _add_config_arguments(parser)
    parser.add_argument("--samples", type=_count, default=3, metavar="N", help="samples to show (default: 3)")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page, too")


def _add_preprocess_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``preprocess``; names follow Megatron's tool where it has them."""
    parser.add_argument(
        "--input", nargs="+", type=Path, required=True, metavar="FILE", help="input files, in order"
    )
    parser.add_argument("--output-prefix", type=Path, required=True, help="output path without .bin and .idx")
    parser.add_argument("--tokenizer-model", required=True, help="directory or hub id of a Hugging Face tokenizer")
    parser.add_argument("--json-key", default="text", help="key of the text in a JSONL line (default: text)")
    parser.add_argument(
        "--format",
        choices=("jsonl", "text", "chat"),
        help="format of the input (default: by file name); chat: lines of JSON with conversations",
    )
    parser.add_argument(
        "--chat-template", metavar="FILE", help="template for --format chat (default: the tokenizer's)"
    )
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
    commands = {"preprocess": _run_preprocess, "preview": _run_preview, "prepare": _run_prepare}
    return commands[args.data_command](args)


def _run_preview(args: argparse.Namespace) -> int:
    """Build the data as the run would, and look at it."""
    from rich.console import Console

    from megatron.bridge.data.loaders import build_iterators
    from megatron.bridge.data.preview import preview
    from megatron.bridge.data.preview_output import to_console, to_html
    from megatron.bridge.utils.atomic import write_text
    from megatron.bridge.utils.console import console, with_width

    config, tokenizer, ranks = _resolved(args)
    micro, batch = config.train.micro_batch_size, config.train.global_batch_size
    held_out = config.validation.eval_iters * batch
    samples = (config.train.train_iters * batch, held_out, held_out)
    data = build_iterators(config.dataset, tokenizer, samples, micro, batch, dp_size=ranks)
    found = preview(config.dataset, data, tokenizer, (micro, batch, ranks), args.samples)
    to_console(with_width(Console(highlight=False, soft_wrap=True)), found)
    if args.html:
        try:
            write_text(args.html, to_html(found))
        except OSError as error:
            raise UserError(f"--html={args.html} cannot be written: {error.strerror}") from error
        console().print(f"{args.html} shows the same as a page")
    return 0


def _run_prepare(args: argparse.Namespace) -> int:
    """Make what is missing in ``dataset.prepared_dir``."""
    from megatron.bridge.data.config import SPLITS, SFTDatasetConfig
    from megatron.bridge.data.finetuning import prepare_split
    from megatron.bridge.training.resolve_data import tuning_parts

    config, tokenizer, _ = _resolved(args)
    parts = [part for part in tuning_parts(config.dataset) if isinstance(part, SFTDatasetConfig)]
    if not parts or any(part.prepared_dir is None for part in parts):
        raise UserError(
            "dataset.prepared_dir is not set, so there is nowhere to keep samples: give a folder, and data for "
            "fine-tuning (indexed corpora are made by data preprocess)"
        )
    for part in parts:
        for split in SPLITS if config.validation.eval_iters else SPLITS[:1]:
            prepare_split(part, split, tokenizer)
    return 0


def _resolved(args: argparse.Namespace) -> "tuple[ConfigContainer, Tokenizer, int]":
    """The config as a run would resolve it, its tokenizer, and the number of data-parallel ranks."""
    from megatron.bridge.cli import train
    from megatron.bridge.data.tokenizer import build_tokenizer

    job = train.prepare(_as_training(args))
    config = job.config
    config.dataset.check_sources()
    world_size = args.world_size or job.world_size or 1
    tokenizer = build_tokenizer(config.tokenizer)
    if config.model.vocab_size is None:
        config.model.vocab_size = tokenizer.vocab_size
    config.validate(world_size)
    return config, tokenizer, config.data_parallel_size(world_size)


def _as_training(args: argparse.Namespace) -> argparse.Namespace:
    """The arguments of ``train`` that lead to the same config, from its own parser."""
    from megatron.bridge.cli import train

    parser = words.Parser(prog="megatron-bridge data preview")
    commands: Any = parser.add_subparsers()
    train.add_parser(commands)
    kind = "--config" if args.source.endswith((".yaml", ".yml")) else "--recipe"
    data = ["--data", args.data] if args.data else []
    model = ["--hf-model", args.hf_model] if args.hf_model else []
    return parser.parse_args(["train", *args.overrides, kind, args.source, *data, *model])


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
            chat_template=args.chat_template,
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
