# SPDX-License-Identifier: Apache-2.0
"""Options that several commands share; a command calls the functions by name in its ``add_arguments``.

An option that only one command has is in the module of that command.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from megatron.bridge.cli.support.parser import (
    POSITIONAL,
    OptionGroup,
    Parser,
    count,
    location,
    location_path,
    memory_size,
)
from megatron.bridge.inference.speculation import METHODS

DTYPES = ("float32", "bfloat16", "float16")
TRAIN_MODES = (
    "pretrain",
    "sft",
    "lora",
    "dora",
    "qlora",
    "distill",
    "cache-teacher",
    "dpo",
    "grpo",
)


def add_recipe_options(
    parser: argparse.ArgumentParser | OptionGroup,
    modes: Sequence[str] = TRAIN_MODES,
    model_alone: bool = False,
) -> None:
    """Add the description of a run: recipe, config file, model, data, and settings to change.

    ``support/train_job.py`` builds the config of the run from these options.

    Args:
        parser: Parser of a command, or a group in its help.
        modes: Choices of ``--mode``.
        model_alone: Whether ``--hf-model`` describes a run without a recipe.
    """
    parser.set_defaults(model_alone=model_alone)
    add_overrides(parser)
    parser.add_argument(
        "--recipe", metavar="NAME", help="recipe to run; `megatron-bridge train --list` shows all"
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="YAML file with settings on top of --recipe, or with a complete config",
    )
    add_trust_config(parser)
    parser.add_argument(
        "--hf-model",
        type=location,
        metavar="ID",
        help=(
            "directory or hub id of a model to train instead of the recipe's: its config, its "
            "tokenizer, and its weights for fine-tuning"
        ),
    )
    parser.add_argument(
        "--data",
        nargs="+",
        metavar="PATH",
        help=(
            "corpora for pretraining; for fine-tuning a folder with training.jsonl, a file, a "
            "dataset that `datasets` saved, or a hub id"
        ),
    )
    parser.add_argument("--mode", choices=modes, help="stage of training (default: the recipe's)")
    parser.add_argument(
        "--step-func",
        metavar="NAME",
        help=(
            "gpt_step, vlm_step, head_step, or package.module.function of your own (default: "
            "vlm_step for a model with a vision tower, head_step for one with model.head, "
            "gpt_step for others)"
        ),
    )
    parser.add_argument(
        "--seq-length", type=int, metavar="N", help="tokens per sample, for data and model"
    )
    parser.add_argument(
        "--peft-scheme",
        metavar="NAME",
        help="adapter to train: lora, dora or qlora; the same as --mode",
    )
    parser.add_argument(
        "--packed-sequence",
        action="store_true",
        help="pack several fine-tuning samples into one row",
    )


def add_overrides(parser: argparse.ArgumentParser | OptionGroup) -> None:
    """Add the settings of a run that are changed on the command line."""
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key.sub=value",
        help="settings to change; values are YAML",
    )


def add_hf_model(
    parser: argparse.ArgumentParser,
    required: bool = True,
    description: str = "model directory or hub id",
) -> None:
    """Add the Hugging Face model that is converted, and the layout of the conversion."""
    add_source_model(parser, description, required)
    add_parallel_sizes(parser)


def add_source_model(
    parser: argparse.ArgumentParser, description: str, required: bool = True
) -> None:
    """Add the Hugging Face model that a command reads, in one process."""
    parser.add_argument(
        "--hf-model", type=location, required=required, metavar="ID", help=description
    )


def add_new_model_folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--hf-path",
        type=location_path,
        required=True,
        metavar="DIR",
        help="model directory to create",
    )


def add_parallel_sizes(parser: argparse.ArgumentParser) -> None:
    """Add the layout of a model that is built under torchrun; ``model_options`` reads it."""
    add_trust_remote_code(parser)
    sizes = parser.add_argument_group("parallel sizes, under torchrun")
    sizes.add_argument("--tp", type=int, default=1, help="tensor-parallel size")
    sizes.add_argument("--pp", type=int, default=1, help="pipeline-parallel size")
    sizes.add_argument("--vp", type=int, help="virtual pipeline stages per rank")
    sizes.add_argument("--ep", type=int, default=1, help="expert-parallel size")
    sizes.add_argument("--etp", type=int, help="tensor-parallel size of the experts")


def add_model_options(parser: Parser, max_requests: int = 32) -> None:
    """Add any checkpoint that generates text, its layout and its memory.

    ``model_options.load`` builds the model from these options.

    Args:
        parser: Parser of a command.
        max_requests: Default number of texts that are processed at the same time.
    """
    parser.add_hidden_names(
        {
            "--hf-model": POSITIONAL,
            "--megatron-path": POSITIONAL,
            "--template": "--chat-template",
            "--tokenizer-model": "--tokenizer",
            "--torch-dtype": "--dtype",
        }
    )
    parser.add_argument(
        "model",
        type=location,
        metavar="PATH",
        help="Hugging Face directory or hub id, Megatron checkpoint, or run with adapters",
    )
    parser.add_argument(
        "--adapter",
        type=location,
        metavar="DIR",
        help=(
            "run, checkpoint or peft directory to put on the model; none leaves out one in its "
            "folder"
        ),
    )
    parser.add_argument("--tokenizer", metavar="ID", help="tokenizer to use instead of the model's")
    parser.add_argument(
        "--chat-template",
        dest="template",
        type=Path,
        metavar="FILE",
        help="chat template to use instead of the tokenizer's",
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, help="dtype of weights and caches (default: as stored)"
    )
    sizes = parser.add_argument_group(
        "parallel sizes; the processes are started unless torchrun has done so"
    )
    sizes.add_argument("--tp", type=count, default=1, help="tensor-parallel size")
    sizes.add_argument("--pp", type=count, default=1, help="pipeline-parallel size")
    sizes.add_argument("--ep", type=count, default=1, help="expert-parallel size")
    sizes.add_argument("--etp", type=count, help="tensor-parallel size of the experts")
    memory = parser.add_argument_group("memory")
    memory.add_argument(
        "--max-context", type=count, metavar="N", help="tokens of a prompt and its completion"
    )
    memory.add_argument(
        "--max-requests",
        type=count,
        default=max_requests,
        metavar="N",
        help="texts to process at the same time",
    )
    memory.add_argument(
        "--kv-memory",
        type=memory_size,
        default="4GB",
        metavar="SIZE",
        help="memory for keys, values and states (4GB)",
    )
    memory.add_argument(
        "--prefix-reuse",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="reuse the caches of texts that begin with the same tokens",
    )
    memory.add_argument(
        "--window-rings",
        action="store_true",
        help=(
            "layers with a sliding window store only the window: more texts fit, but no prefix "
            "is reused"
        ),
    )
    memory.add_argument(
        "--speculative",
        choices=METHODS,
        help=(
            "draft tokens and compute several in each step, with the same texts: ngram looks up "
            "what followed the last tokens earlier in the text, mtp uses the model's MTP layer"
        ),
    )
    memory.add_argument(
        "--speculative-tokens",
        type=count,
        metavar="K",
        help="maximum drafts of a text in each step (4)",
    )
    memory.add_argument(
        "--graphs",
        action=argparse.BooleanOptionalAction,
        default=True,
        help=(
            "replay decoding steps on one rank: CUDA graphs on a GPU, recorded operators on a CPU"
        ),
    )
    add_trust_remote_code(parser)
    add_trust_checkpoint(parser)


def add_sampling_options(
    parser: argparse.ArgumentParser,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    temperature_help: str = "0, the default, is greedy",
) -> None:
    """Add how a prompt is continued; ``model_options.sampling_values`` reads these options.

    Args:
        parser: Parser of a command.
        max_new_tokens: Default number of new tokens.
        temperature: Default temperature.
        temperature_help: Help text of the temperature, which names the default.
    """
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--max-new-tokens",
        type=int,
        default=max_new_tokens,
        metavar="N",
        help="maximum number of new tokens",
    )
    group.add_argument("--temperature", type=float, default=temperature, help=temperature_help)
    group.add_argument(
        "--top-k", type=int, default=0, metavar="K", help="keep the K most likely tokens"
    )
    group.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="keep the most likely tokens that sum up to P",
    )
    group.add_argument(
        "--min-p",
        type=float,
        default=0.0,
        metavar="P",
        help="keep tokens at least P times as likely as the best",
    )
    group.add_argument(
        "--repetition-penalty",
        type=float,
        default=1.0,
        metavar="X",
        help="divide logits of repeated tokens by X",
    )
    group.add_argument(
        "--seed", type=int, help="the same seed gives the same text in any batch and layout"
    )
    group.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end before TEXT; repeatable",
    )


def add_tool_parser(parser: argparse.ArgumentParser) -> None:
    """Add the format in which the model writes calls of tools."""
    parser.add_argument(
        "--tool-parser",
        metavar="NAME",
        help="format of tool calls, such as hermes (default: by the chat template)",
    )


def add_no_adapter(parser: argparse.ArgumentParser) -> None:
    """Add the choice to leave out an adapter that is stored with the weights of a model."""
    parser.add_argument(
        "--adapter",
        choices=["none"],
        help="none leaves out an adapter that is in the folder of the model",
    )


def add_strip_prefix(parser: argparse.ArgumentParser) -> None:
    """Add the prefix that a wrapper, such as DDP, put in front of the names of all tensors."""
    parser.add_argument(
        "--strip-prefix",
        metavar="PREFIX",
        default="",
        help=(
            "leave out this prefix of all tensors' names, which a wrapper added, such as 'module.'"
        ),
    )


def add_no_progress(
    parser: argparse.ArgumentParser, description: str = "show no progress bar"
) -> None:
    parser.add_argument("--no-progress", action="store_true", help=description)


def add_trust_remote_code(
    parser: argparse.ArgumentParser,
    description: str = "run Python code that the model's repository contains",
) -> None:
    parser.add_argument("--trust-remote-code", action="store_true", help=description)


def add_trust_checkpoint(parser: argparse.ArgumentParser) -> None:
    """Add the consent to unpickle; ``main`` asks for it before it runs any command."""
    parser.add_argument(
        "--trust-checkpoint",
        action="store_true",
        help="unpickle all classes in the checkpoint, which can run code",
    )


def add_trust_config(parser: argparse.ArgumentParser | OptionGroup) -> None:
    parser.add_argument(
        "--trust-config",
        action="store_true",
        help="import functions and classes of your own that the YAML file names, which can run code",
    )


def add_quantization(parser: argparse.ArgumentParser) -> None:
    """Add the options of a command that can write quantized weights."""
    parser.add_argument(
        "--quantize",
        metavar="FORMAT",
        help=(
            "write matrices of attention, MLPs and experts as fp8-block, fp8-tensor, mxfp8, mxfp4, "
            "nvfp4, int4, int4-awq or int8; source: what was not trained bitwise as --hf-model "
            "stores it, the rest in its format; trained: what model.qat rounded, in its format "
            "(default: weights in full)"
        ),
    )
    parser.add_argument(
        "--group-size",
        type=int,
        metavar="N",
        help="with --quantize fp8-block, int4 or int4-awq: neighbors that share a scale (128)",
    )
    parser.add_argument(
        "--keep-high",
        nargs="+",
        default=[],
        metavar="PATTERN",
        help="with --quantize: Hugging Face names that stay in full, such as '*.0.mlp.*'",
    )
