# SPDX-License-Identifier: Apache-2.0
"""``megatron-bridge data``: prepare training data, and preview it."""

import argparse
import math
import os
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.bridge.cli.support import train_job
from megatron.bridge.cli.support.options import (
    add_recipe_options,
    add_trust_remote_code,
)
from megatron.bridge.cli.support.output_files import HtmlPage
from megatron.bridge.cli.support.parser import Parser, Refused, count, workers
from megatron.bridge.cli.support.text_format import write_file
from megatron.bridge.utils.console import console, ensure_width
from megatron.bridge.utils.errors import UserError

if TYPE_CHECKING:
    from megatron.bridge.data.pretraining.preprocess import PreprocessConfig
    from megatron.bridge.data.records.preparation import PreparedSamples
    from megatron.bridge.data.tokenizer import Tokenizer
    from megatron.bridge.training.config import ConfigContainer


PREPROCESS_EXAMPLE = r"""example:
  megatron-bridge data preprocess --input corpus.jsonl --tokenizer-model HuggingFaceTB/SmolLM2-135M \
      --output-prefix data/corpus --append-eod
"""
PREVIEW_EXAMPLE = r"""example:
  megatron-bridge data preview --recipe llama32_1b_finetune_config --data chats --html preview.html \
      dataset.train_on=last train.micro_batch_size=2
"""
PREPARE_EXAMPLE = r"""example:
  megatron-bridge data prepare --recipe llama32_1b_finetune_config --data chats dataset.prepared_dir=prepared \
      dataset.workers=8
"""

_TOKENIZER_TYPES = (
    "HuggingFaceTokenizer",
    "GPT2BPETokenizer",
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "TikTokenizer",
)
"""Kinds of tokenizers by the names that Megatron-LM has for them; three are SentencePiece's."""
_TOKENIZER_OPTIONS = {
    "GPT2BPETokenizer": ("vocab_file", "merge_file"),
    "TikTokenizer": ("tiktoken_pattern", "tiktoken_num_special_tokens", "vocab_size"),
}
"""Options that only one kind has."""


def add_arguments(parser: Parser) -> None:
    parser.description = "Prepare training data, and preview it."
    commands = parser.add_subparsers(dest="subcommand", required=True, metavar="COMMAND")

    preprocessing = commands.add_parser(
        "preprocess",
        help="tokenize text into an indexed dataset",
        description=(
            "Tokenize JSONL or plain text into Megatron-Core's indexed format (.bin and .idx)."
        ),
        epilog=PREPROCESS_EXAMPLE,
    )
    preprocessing.set_defaults(run_subcommand=preprocess_text)
    preprocessing.add_hidden_names({"--tokenizer": "--tokenizer-model"})
    _add_preprocess_options(preprocessing)

    previewing = commands.add_parser(
        "preview",
        help="show what a run will train on",
        description=(
            "Show samples with their loss masks, counts, lengths, packing and the first batches."
        ),
        epilog=PREVIEW_EXAMPLE,
    )
    previewing.set_defaults(run_subcommand=preview_data)
    _add_run_options(previewing)
    previewing.add_argument(
        "--samples", type=count, default=3, metavar="N", help="samples to show (default: 3)"
    )
    previewing.add_argument(
        "--full", action="store_true", help="show long samples to their end, not only both ends"
    )
    previewing.add_argument("--html", type=HtmlPage, metavar="FILE", help="also write a web page")

    preparing = commands.add_parser(
        "prepare",
        help="tokenize the records of a run once, for later runs",
        description=(
            "Tokenize the records of a run into dataset.prepared_dir. Repeat an interrupted "
            "command to continue where it stopped."
        ),
        epilog=PREPARE_EXAMPLE,
    )
    preparing.set_defaults(run_subcommand=prepare_data)
    _add_run_options(preparing)


def _add_run_options(parser: Parser) -> None:
    """Add the run whose data is built, as for ``train``."""
    add_recipe_options(parser)
    parser.add_argument(
        "--world-size",
        type=count,
        metavar="N",
        help="processes of the run (default: as many as the recipe names or its layout needs)",
    )


def _add_preprocess_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the tokenization; names follow Megatron-LM's tool where it has the same."""
    parser.add_argument(
        "--input",
        dest="inputs",
        nargs="+",
        required=True,
        metavar="INPUT",
        help=(
            "files or URLs (.jsonl, .txt, .parquet; also .gz and .zst), patterns, or "
            "hub:ID?revision=COMMIT, in order"
        ),
    )
    parser.add_argument(
        "--output-prefix",
        type=Path,
        required=True,
        help="output path without .bin and .idx",
    )
    parser.add_argument(
        "--tokenizer-model",
        help="directory or hub id of a Hugging Face tokenizer, or a file of another --tokenizer-type",
    )
    keys = parser.add_mutually_exclusive_group()
    keys.add_argument(
        "--json-key", default="text", help="key of the text in a line of JSONL (default: text)"
    )
    keys.add_argument(
        "--json-keys",
        nargs="+",
        metavar="KEY",
        help="one dataset for each of these keys, named PREFIX_KEY_document as by Megatron-LM",
    )
    parser.add_argument(
        "--tokenizer-type",
        default="HuggingFaceTokenizer",
        choices=_TOKENIZER_TYPES,
        help=(
            "the kind of tokenizer. All but HuggingFaceTokenizer (the default) are written in "
            "Hugging Face's format to PREFIX_tokenizer, for training. GPT2BPETokenizer reads --vocab-file and "
            "--merge-file; the others read a file, given as --tokenizer-model"
        ),
    )
    parser.add_argument("--vocab-file", type=Path, help="vocab.json of GPT2BPETokenizer")
    parser.add_argument("--merge-file", type=Path, help="merges.txt of GPT2BPETokenizer")
    parser.add_argument(
        "--tiktoken-pattern",
        choices=["v1", "v2"],
        help="how TikTokenizer finds words (default: v2)",
    )
    parser.add_argument(
        "--tiktoken-num-special-tokens",
        type=int,
        metavar="N",
        help="special tokens of TikTokenizer, before those of its file (default: 1000)",
    )
    parser.add_argument(
        "--vocab-size", type=int, metavar="N", help="tokens of TikTokenizer in all (default: all)"
    )
    parser.add_argument(
        "--partitions",
        type=workers,
        metavar="N",
        help="Megatron-LM's groups of workers; multiplied by --workers",
    )
    parser.add_argument(
        "--keep-sequential-samples",
        action="store_true",
        help="accepted for Megatron-LM; the output always has the order of the input",
    )
    parser.add_argument(
        "--format",
        choices=["jsonl", "text", "chat"],
        help=(
            "format of the input (default: by file name); chat: conversations, one per line of "
            "JSONL"
        ),
    )
    parser.add_argument(
        "--chat-template",
        metavar="FILE",
        help="template for --format chat (default: the tokenizer's)",
    )
    parser.add_argument(
        "--text-document",
        choices=["file", "line"],
        default="file",
        help="what counts as a document in plain text (default: the entire file)",
    )
    parser.add_argument(
        "--append-eod",
        action="store_true",
        help="end each document with the end-of-sequence token",
    )
    parser.add_argument(
        "--add-special-tokens",
        action="store_true",
        help="let the tokenizer add its special tokens, such as BOS",
    )
    parser.add_argument("--workers", type=workers, help="worker processes (default: all cores)")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing output")
    shards = parser.add_argument_group("shards, for terabytes")
    shards.add_argument(
        "--executor",
        choices=["local", "slurm", "ray"],
        help="where shards are made (default: no shards)",
    )
    shards.add_argument(
        "--shard-mb",
        type=count,
        metavar="N",
        help="megabytes of input per shard (default: 256)",
    )
    shards.add_argument(
        "--sbatch", nargs="+", metavar="KEY=VALUE", help="options of sbatch, without --"
    )
    add_trust_remote_code(parser, "run Python code that the tokenizer's repository contains")
    for name, reason in MEGATRON_LM_ONLY.items():
        parser.add_argument(name, action=Refused, reason=reason)


_NO_SEARCH = "this tool does not search for a number of workers: give --workers"
MEGATRON_LM_ONLY = {
    "--split-sentences": "GPT models take complete documents: remove it",
    "--keep-newlines": "newlines are always kept: remove it",
    "--lang": "GPT models take complete documents: remove it",
    "--find-optimal-num-workers": _NO_SEARCH,
    "--workers-to-check": _NO_SEARCH,
    "--max-documents": (
        "it limits the search for a number of workers, which this tool does not do: give --workers"
    ),
    "--performance-dir": _NO_SEARCH,
    "--log-interval": "a terminal shows a progress bar in bytes: remove it",
}
"""Arguments of Megatron-LM's tool without a counterpart, and what to do instead."""


def run(args: argparse.Namespace) -> int:
    return args.run_subcommand(args)


def preview_data(args: argparse.Namespace) -> int:
    from rich.console import Console

    from megatron.bridge.data.preview.collect import preview
    from megatron.bridge.data.preview.render import PART_LENGTH, to_console, to_html
    from megatron.bridge.training.setup import build_data

    config, tokenizer, ranks = _resolve(args)
    sizes = (config.train.micro_batch_size, config.train.global_batch_size, ranks)
    data = build_data(config, tokenizer, place=(0, ranks))
    data_preview = preview(config.dataset, data, tokenizer, sizes, args.samples)
    terminal = ensure_width(Console(highlight=False, soft_wrap=True))
    to_console(terminal, data_preview, None if args.full else PART_LENGTH)
    if args.html:
        write_file("--html", args.html, to_html(data_preview))
        console().print(f"{args.html} shows the same as a web page")
    return 0


def prepare_data(args: argparse.Namespace) -> int:
    from megatron.bridge.data.config import SPLITS, SFTDatasetConfig
    from megatron.bridge.data.finetuning.builder import prepare_split
    from megatron.bridge.training.config.resolve.data import tuning_parts, validation_sets

    config, tokenizer, _ = _resolve(args)
    parts = [part for part in tuning_parts(config.dataset) if isinstance(part, SFTDatasetConfig)]
    if not parts or any(part.prepared_dir is None for part in parts):
        raise UserError(
            "dataset.prepared_dir is not set: give a folder for the samples, and data for fine-tuning "
            "(`data preprocess` prepares data for pretraining)"
        )
    for dataset in validation_sets(config).values():
        for part in tuning_parts(dataset):
            if isinstance(part, SFTDatasetConfig) and part not in parts:
                _print_prepared(prepare_split(part, "valid", tokenizer))
    for part in parts:
        for split in SPLITS if config.validation.eval_iters else SPLITS[:1]:
            _print_prepared(prepare_split(part, split, tokenizer))
    return 0


def _print_prepared(prepared: "PreparedSamples | None") -> None:
    """Print what became of the records of a split, if there is one."""
    if prepared is not None:
        console().print(f"{prepared.name}: {'; '.join(prepared.report.lines())}", markup=False)


def _resolve(args: argparse.Namespace) -> "tuple[ConfigContainer, Tokenizer, int]":
    """Return the config as a run resolves it, its tokenizer, and the number of data-parallel ranks."""
    from megatron.bridge.training.setup import add_tokenizer

    _take_source(args)
    job = train_job.prepare(args)
    resolved = add_tokenizer(job.resolve(args.world_size or _smallest_world_size(job)))
    config = resolved.config
    return config, resolved.tokenizer, config.data_parallel_size(resolved.world_size)


def _take_source(args: argparse.Namespace) -> None:
    """Accept the recipe or the config file as the first word, without ``--recipe`` or ``--config``."""
    has_source = args.overrides and not train_job.is_override(args.overrides[0])
    if not has_source or args.recipe is not None or args.config is not None:
        return
    source = args.overrides.pop(0)
    if source.endswith((".yaml", ".yml")):
        args.config = Path(source)
    else:
        args.recipe = source


def _smallest_world_size(job: train_job.TrainJob) -> int:
    """Return the processes of the recipe, and more only if the layout of the model needs more."""
    model = job.config.model
    replica = (
        model.tensor_model_parallel_size
        * model.pipeline_model_parallel_size
        * model.context_parallel_size
    )
    world_size = job.world_size or 1
    return world_size if replica < 1 else math.ceil(world_size / replica) * replica


def preprocess_text(args: argparse.Namespace) -> int:
    from megatron.bridge.data.pretraining.preprocess import PreprocessConfig, preprocess

    args.workers = (args.workers or os.cpu_count() or 1) * (args.partitions or 1)
    args.tokenizer_model = _tokenizer_folder(args)
    config = PreprocessConfig(
        **{field.name: getattr(args, field.name) for field in fields(PreprocessConfig)}
    )
    if args.executor:
        return _run_shards(args, config)
    if args.shard_mb or args.sbatch:
        raise UserError(
            "--shard-mb and --sbatch are for shards: add --executor local, slurm or ray"
        )
    for part in _for_each_key(config, args.json_keys):
        console().print(f"{part.output_prefix}.bin and .idx: {preprocess(part).summary()}")
    return 0


def _tokenizer_folder(args: argparse.Namespace) -> str:
    """Return the folder or hub id of the tokenizer; one of another format is written in Hugging Face's."""
    kind = args.tokenizer_type
    _refuse_idle_tokenizer_options(args)
    if kind == "HuggingFaceTokenizer":
        if args.tokenizer_model is None:
            raise UserError("--tokenizer-model is missing: give a directory or hub id")
        return args.tokenizer_model
    from megatron.bridge.data.pretraining import foreign_tokenizers

    folder = args.output_prefix.with_name(f"{args.output_prefix.name}_tokenizer")
    if kind == "GPT2BPETokenizer":
        if None in (args.vocab_file, args.merge_file):
            raise UserError(f"--tokenizer-type {kind} needs --vocab-file and --merge-file")
        return str(
            foreign_tokenizers.write_gpt2_tokenizer(args.vocab_file, args.merge_file, folder)
        )
    if args.tokenizer_model is None:
        raise UserError(f"--tokenizer-type {kind} needs the tokenizer's file as --tokenizer-model")
    model_file = Path(args.tokenizer_model)
    if kind == "TikTokenizer":
        return str(
            foreign_tokenizers.write_tiktoken_tokenizer(
                model_file,
                folder,
                args.tiktoken_pattern or "v2",
                args.tiktoken_num_special_tokens or 1000,
                args.vocab_size,
            )
        )
    return str(foreign_tokenizers.write_sentencepiece_tokenizer(model_file, folder))


def _refuse_idle_tokenizer_options(args: argparse.Namespace) -> None:
    """Raise UserError for options of another kind of tokenizer."""
    for kind, options in _TOKENIZER_OPTIONS.items():
        given = [
            f"--{name.replace('_', '-')}" for name in options if getattr(args, name) is not None
        ]
        if given and args.tokenizer_type != kind:
            raise UserError(
                f"{' and '.join(given)} belong to --tokenizer-type {kind}: add it, or leave them out"
            )


def _run_shards(args: argparse.Namespace, config: "PreprocessConfig") -> int:
    from megatron.bridge.data.pretraining.shards import preprocess_shards

    sbatch = dict(word.removeprefix("--").partition("=")[::2] for word in args.sbatch or ())
    for part in _for_each_key(config, args.json_keys):
        shard_manifest = preprocess_shards(
            part, args.executor, (args.shard_mb or 256) * 10**6, sbatch
        )
        counts = (
            f"{shard_manifest['documents']:,} documents, {shard_manifest['tokens']:,} tokens in "
            f"{len(shard_manifest['shards']):,} shards"
        )
        console().print(
            f"{part.output_prefix}.manifest.json: {counts}; train on it with --data {part.output_prefix}"
        )
    return 0


def _for_each_key(config: "PreprocessConfig", keys: list[str] | None) -> "list[PreprocessConfig]":
    prefix = config.output_prefix
    return [
        replace(
            config, json_key=key, output_prefix=prefix.with_name(f"{prefix.name}_{key}_document")
        )
        for key in keys or ()
    ] or [config]
