# SPDX-License-Identifier: Apache-2.0
"""``megatron-bridge data``: prepare training data, and preview it."""

import argparse
import os
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.bridge.cli.support import train_job
from megatron.bridge.cli.support.parser import Parser, count, workers
from megatron.bridge.cli.support.text_format import write_file
from megatron.bridge.utils.errors import UserError

if TYPE_CHECKING:
    from megatron.bridge.data.pretraining.preprocess import PreprocessConfig
    from megatron.bridge.data.tokenizer import Tokenizer
    from megatron.bridge.training.config import ConfigContainer

DESCRIPTION = "Prepare training data, and preview it."
PREPROCESS_EXAMPLE = """example:
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
_SENTENCES = "only whole documents are written, which is what GPT models take: remove it"
_SEARCH = "no number of workers is searched for: give --workers"
_NOT_HERE = {
    "--split-sentences": _SENTENCES,
    "--keep-newlines": "newlines are always kept: remove it",
    "--lang": _SENTENCES,
    "--find-optimal-num-workers": _SEARCH,
    "--workers-to-check": _SEARCH,
    "--max-documents": f"it only limits that search, and {_SEARCH}",
    "--performance-dir": _SEARCH,
    "--log-interval": "a terminal shows a progress bar in bytes: remove it",
    "--vocab-file": "give a tokenizer in Hugging Face's format with --tokenizer-model",
    "--merge-file": "give a tokenizer in Hugging Face's format with --tokenizer-model",
}
"""Arguments of Megatron-LM's tool without a counterpart, and the way out."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="data_command", required=True, metavar="COMMAND")
    _add_preprocess_arguments(
        commands.add_parser(
            "preprocess",
            help="tokenize text into an indexed dataset",
            description="Tokenize JSONL or plain text into Megatron-Core's indexed format (.bin and .idx).",
            epilog=PREPROCESS_EXAMPLE,
        )
    )
    preview = commands.add_parser(
        "preview",
        help="show what a run will train on",
        description="Show samples with their loss masks, counts, lengths, packing and the first batches.",
        epilog=PREVIEW_EXAMPLE,
    )
    _add_config_arguments(preview)
    preview.add_argument("--samples", type=count, default=3, metavar="N", help="samples to show (default: 3)")
    preview.add_argument("--html", type=Path, metavar="FILE", help="also write a web page")
    _add_config_arguments(
        commands.add_parser(
            "prepare",
            help="tokenize the records of a run once, for later runs",
            description="Tokenize the records of a run into dataset.prepared_dir. Repeat an interrupted command "
            "to continue where it stopped.",
            epilog=PREPARE_EXAMPLE,
        )
    )


def _add_config_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="CONFIG", help="YAML file with a complete config, or name of a recipe")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="settings to change; values are YAML")
    parser.add_argument("--data", metavar="DIR", help="folder of the data, for a recipe")
    train_job.add_trust_config(parser)
    parser.add_argument("--hf-model", metavar="ID", help="model to train instead of the recipe's")
    parser.add_argument(
        "--world-size",
        type=count,
        metavar="N",
        help="processes of the run (default: as many as the recipe names, or 1)",
    )


def _add_preprocess_arguments(parser: argparse.ArgumentParser) -> None:
    """Names follow Megatron-LM's tool where it has the same options."""
    parser.add_argument(
        "--input",
        dest="inputs",
        nargs="+",
        required=True,
        metavar="INPUT",
        help="files or URLs (.jsonl, .txt, .parquet; also .gz and .zst), patterns, or hub:ID?revision=COMMIT, in order",
    )
    parser.add_argument("--output-prefix", type=Path, required=True, help="output path without .bin and .idx")
    parser.add_argument("--tokenizer-model", required=True, help="directory or hub id of a Hugging Face tokenizer")
    keys = parser.add_mutually_exclusive_group()
    keys.add_argument("--json-key", default="text", help="key of the text in a line of JSONL (default: text)")
    keys.add_argument(
        "--json-keys",
        nargs="+",
        metavar="KEY",
        help="one dataset for each of these keys, named PREFIX_KEY_document as by Megatron-LM",
    )
    parser.add_argument(
        "--tokenizer-type",
        choices=("HuggingFaceTokenizer",),
        default="HuggingFaceTokenizer",
        help="the only type; other tokenizers are converted to Hugging Face's format first",
    )
    parser.add_argument(
        "--partitions", type=workers, metavar="N", help="Megatron-LM's groups of workers; they are multiplied"
    )
    parser.add_argument(
        "--keep-sequential-samples",
        action="store_true",
        help="Megatron-LM's; the output has the order of the input with and without it",
    )
    for name in _NOT_HERE:
        parser.add_argument(name, nargs="*", action=_Refused, help=argparse.SUPPRESS)
    parser.add_argument(
        "--format",
        choices=("jsonl", "text", "chat"),
        help="format of the input (default: by file name); chat: conversations, one per line of JSONL",
    )
    parser.add_argument("--chat-template", metavar="FILE", help="template for --format chat (default: the tokenizer's)")
    parser.add_argument(
        "--text-document",
        choices=("file", "line"),
        default="file",
        help="what counts as a document in plain text (default: the whole file)",
    )
    parser.add_argument("--append-eod", action="store_true", help="end each document with the end-of-sequence token")
    parser.add_argument(
        "--add-special-tokens", action="store_true", help="let the tokenizer add its special tokens, such as BOS"
    )
    parser.add_argument(
        "--workers", type=workers, default=os.cpu_count() or 1, help="worker processes (default: all cores)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing output")
    shards = parser.add_argument_group("shards, for terabytes")
    shards.add_argument("--executor", choices=("local", "slurm", "ray"), help="what makes shards (default: no shards)")
    shards.add_argument("--shard-mb", type=count, metavar="N", help="megabytes of input in each (default: 256)")
    shards.add_argument("--sbatch", nargs="+", metavar="KEY=VALUE", help="options of sbatch, without --")
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run Python code that the tokenizer's repository contains"
    )


class _Refused(argparse.Action):
    """Ends the command with the reason why an argument of Megatron-LM is not taken."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        parser.error(f"{self.option_strings[0]} is not supported: {_NOT_HERE[self.option_strings[0]]}")


def run(args: argparse.Namespace) -> int:
    commands = {"preprocess": _run_preprocess, "preview": _run_preview, "prepare": _run_prepare}
    return commands[args.data_command](args)


def _run_preview(args: argparse.Namespace) -> int:
    from rich.console import Console

    from megatron.bridge.data.preview.collect import preview
    from megatron.bridge.data.preview.render import to_console, to_html
    from megatron.bridge.training.setup import build_data
    from megatron.bridge.utils.console import console, ensure_width

    config, tokenizer, ranks = _resolved(args)
    sizes = (config.train.micro_batch_size, config.train.global_batch_size, ranks)
    data = build_data(config, tokenizer, place=(0, ranks))
    found = preview(config.dataset, data, tokenizer, sizes, args.samples)
    to_console(ensure_width(Console(highlight=False, soft_wrap=True)), found)
    if args.html:
        write_file("--html", args.html, to_html(found))
        console().print(f"{args.html} shows the same as a web page")
    return 0


def _run_prepare(args: argparse.Namespace) -> int:
    from megatron.bridge.data.config import SPLITS, SFTDatasetConfig
    from megatron.bridge.data.finetuning.builder import prepare_split
    from megatron.bridge.training.config.resolve.data import tuning_parts
    from megatron.bridge.utils.console import console

    config, tokenizer, _ = _resolved(args)
    parts = [part for part in tuning_parts(config.dataset) if isinstance(part, SFTDatasetConfig)]
    if not parts or any(part.prepared_dir is None for part in parts):
        raise UserError(
            "dataset.prepared_dir is not set: give a folder for the samples, and data for fine-tuning "
            "(`data preprocess` prepares data for pretraining)"
        )
    for part in parts:
        for split in SPLITS if config.validation.eval_iters else SPLITS[:1]:
            if (prepared := prepare_split(part, split, tokenizer)) is not None:
                console().print(f"{prepared.name}: {'; '.join(prepared.report.lines())}", markup=False)
    return 0


def _resolved(args: argparse.Namespace) -> "tuple[ConfigContainer, Tokenizer, int]":
    """The config as a run would resolve it, its tokenizer, and the number of data-parallel ranks."""
    from megatron.bridge.training.setup import add_tokenizer

    job = train_job.prepare(_as_training(args))
    resolved = add_tokenizer(job.resolve(args.world_size or job.world_size or 1))
    return resolved.config, resolved.tokenizer, resolved.config.data_parallel_size(resolved.world_size)


def _as_training(args: argparse.Namespace) -> argparse.Namespace:
    """The arguments of ``train`` that give the same config, from its own parser."""
    parser = Parser(prog="megatron-bridge data preview")
    train_job.add_job_options(parser)
    source = {"config": Path(args.source)} if args.source.endswith((".yaml", ".yml")) else {"recipe": args.source}
    data = [args.data] if args.data else None
    same = {"hf_model": args.hf_model, "trust_config": args.trust_config}
    return parser.parse_args(args.overrides, argparse.Namespace(data=data, **source, **same))


def _run_preprocess(args: argparse.Namespace) -> int:
    from megatron.bridge.data.pretraining.preprocess import PreprocessConfig, preprocess
    from megatron.bridge.utils.console import console

    args.workers *= args.partitions or 1
    config = PreprocessConfig(**{field.name: getattr(args, field.name) for field in fields(PreprocessConfig)})
    if args.executor:
        return _run_shards(args, config)
    if args.shard_mb or args.sbatch:
        raise UserError("--shard-mb and --sbatch are for shards: add --executor local, slurm or ray")
    for part in _for_each_key(config, args.json_keys):
        console().print(f"{part.output_prefix}.bin and .idx: {preprocess(part).summary()}")
    return 0


def _run_shards(args: argparse.Namespace, config: "PreprocessConfig") -> int:
    from megatron.bridge.data.pretraining.shards import preprocess_shards
    from megatron.bridge.utils.console import console

    sbatch = dict(word.removeprefix("--").partition("=")[::2] for word in args.sbatch or ())
    for part in _for_each_key(config, args.json_keys):
        made = preprocess_shards(part, args.executor, (args.shard_mb or 256) * 10**6, sbatch)
        counts = f"{made['documents']:,} documents, {made['tokens']:,} tokens in {len(made['shards']):,} shards"
        console().print(f"{part.output_prefix}.manifest.json: {counts}; train on it with --data {part.output_prefix}")
    return 0


def _for_each_key(config: "PreprocessConfig", keys: list[str] | None) -> "list[PreprocessConfig]":
    prefix = config.output_prefix
    return [
        replace(config, json_key=key, output_prefix=prefix.with_name(f"{prefix.name}_{key}_document"))
        for key in keys or ()
    ] or [config]
