# SPDX-License-Identifier: Apache-2.0
"""Options of the scripts for inference and conversion, under the names of the Megatron Bridge API's scripts."""

import argparse
from typing import Any

from megatron.bridge.cli.support.options import (
    DTYPES,
    add_trust_checkpoint,
    add_trust_remote_code,
)
from megatron.bridge.cli.support.parser import count
from megatron.bridge.utils.errors import UserError


def add_script_options(parser: argparse.ArgumentParser) -> None:
    """Add the model of a script and its layout; ``load_of_script`` builds the model."""
    parser.add_argument(
        "--hf_model_path", "--hf-model-path", metavar="ID", help="Hugging Face model"
    )
    parser.add_argument(
        "--megatron_model_path",
        "--megatron-model-path",
        metavar="DIR",
        help="Megatron checkpoint of the model",
    )
    parser.add_argument("--max_new_tokens", "--max-new-tokens", type=int, default=20)
    parser.add_argument("--tp", type=count, default=1)
    parser.add_argument("--pp", type=count, default=1)
    parser.add_argument("--ep", type=count, default=1)
    parser.add_argument("--etp", type=count)
    parser.add_argument("--dtype", choices=DTYPES)
    add_trust_remote_code(parser)
    add_trust_checkpoint(parser)


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add the sizes of the engine; ``script_engine`` reads them."""
    parser.add_argument("--max_seq_length", "--max-seq-length", type=count)
    parser.add_argument("--max_batch_size", "--max-batch-size", type=count, default=32)
    parser.add_argument(
        "--max_tokens", "--max-tokens", type=count, default=1024, help="new tokens of a step"
    )
    parser.add_argument(
        "--kv_cache_buffer_size_gb", "--kv-cache-buffer-size-gb", type=float, default=4.0
    )


def load_of_script(args: argparse.Namespace, **options: Any) -> Any:
    """Return the ``LLM`` that the options of ``add_script_options`` describe."""
    from megatron.bridge.inference.llm import LLM

    path, model_arguments = script_model(args)
    return LLM(path, **model_arguments, **options)


def script_model(args: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """Return the path and the keyword arguments of ``LLM`` from ``add_script_options``."""
    path = args.megatron_model_path or args.hf_model_path
    if path is None:
        raise UserError("no model: give --hf_model_path or --megatron_model_path")
    names = ("tp", "pp", "ep", "etp", "dtype", "trust_remote_code", "trust_checkpoint")
    model_arguments = {name: getattr(args, name) for name in names}
    model_arguments["tokenizer"] = args.hf_model_path if args.megatron_model_path else None
    return path, model_arguments


def script_engine(args: argparse.Namespace) -> dict[str, Any]:
    """Return the keyword arguments of ``LLM`` from ``add_engine_options``."""
    return {
        "max_context": args.max_seq_length,
        "max_requests": args.max_batch_size,
        "rows": args.max_tokens,
        "kv_memory": int(args.kv_cache_buffer_size_gb * (1 << 30)),
    }
