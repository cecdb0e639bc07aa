# SPDX-License-Identifier: Apache-2.0
"""``megatron-bridge data``: prepare training data, and preview it."""

import argparse
import os
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.bridge.cli.support import train_job
from megatron.bridge.cli.support.parser import Parser, add_shared
from megatron.bridge.cli.support.text_format import write_file
from megatron.bridge.utils.console import console, ensure_width
from megatron.bridge.utils.errors import UserError

if TYPE_CHECKING:
    from megatron.bridge.data.pretraining.preprocess import PreprocessConfig
    from megatron.bridge.data.tokenizer import Tokenizer
    from megatron.bridge.training.config import ConfigContainer


def run(args: argparse.Namespace) -> int:
    commands = {"preprocess": _run_preprocess, "preview": _run_preview, "prepare": _run_prepare}
    return commands[args.subcommand](args)


def _run_preview(args: argparse.Namespace) -> int:
    from rich.console import Console

    from megatron.bridge.data.preview.collect import preview
    from megatron.bridge.data.preview.render import to_console, to_html
    from megatron.bridge.training.setup import build_data

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
                console().print(
                    f"{prepared.name}: {'; '.join(prepared.report.lines())}", markup=False
                )
    return 0


def _resolved(args: argparse.Namespace) -> "tuple[ConfigContainer, Tokenizer, int]":
    """The config as a run would resolve it, its tokenizer, and the number of data-parallel ranks."""
    from megatron.bridge.training.setup import add_tokenizer

    job = train_job.prepare(_as_training(args))
    resolved = add_tokenizer(job.resolve(args.world_size or job.world_size or 1))
    return (
        resolved.config,
        resolved.tokenizer,
        resolved.config.data_parallel_size(resolved.world_size),
    )


def _as_training(args: argparse.Namespace) -> argparse.Namespace:
    """The arguments of ``train`` that give the same config, from its own parser."""
    parser = Parser(prog="megatron-bridge data preview")
    add_shared(parser, "job")
    source = (
        {"config": Path(args.source)}
        if args.source.endswith((".yaml", ".yml"))
        else {"recipe": args.source}
    )
    data = [args.data] if args.data else None
    same = {"hf_model": args.hf_model, "trust_config": args.trust_config}
    return parser.parse_args(args.overrides, argparse.Namespace(data=data, **source, **same))


def _run_preprocess(args: argparse.Namespace) -> int:
    from megatron.bridge.data.pretraining.preprocess import PreprocessConfig, preprocess

    args.workers = (args.workers or os.cpu_count() or 1) * (args.partitions or 1)
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


def _run_shards(args: argparse.Namespace, config: "PreprocessConfig") -> int:
    from megatron.bridge.data.pretraining.shards import preprocess_shards

    sbatch = dict(word.removeprefix("--").partition("=")[::2] for word in args.sbatch or ())
    for part in _for_each_key(config, args.json_keys):
        made = preprocess_shards(part, args.executor, (args.shard_mb or 256) * 10**6, sbatch)
        counts = f"{made['documents']:,} documents, {made['tokens']:,} tokens in {len(made['shards']):,} shards"
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
