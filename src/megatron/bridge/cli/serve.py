# SPDX-License-Identifier: Apache-2.0
"""``megatron-bridge serve``: a server with OpenAI's endpoints, for any checkpoint, under any layout."""

import argparse
import os
from pathlib import Path
from typing import Any

from megatron.bridge.cli.support import model_options
from megatron.bridge.cli.support.options import add_model_options, add_tool_parser
from megatron.bridge.cli.support.parser import NamedPaths, Parser, count
from megatron.bridge.utils.atomic import read_text
from megatron.bridge.utils.errors import UserError
from megatron.bridge.utils.optional_imports import import_optional
from megatron.bridge.utils.telemetry import EXTRA

KEY_VARIABLE = "MEGATRON_BRIDGE_API_KEY"
PACKAGES = ("fastapi", "uvicorn", "prometheus_client")
_SHORTEST_KEY = 16
_MOST_ADAPTERS = 32  # loaded or trained at a time
_MICRO_BATCH_SIZE = 4
_REQUEST_SECONDS = 600
_MAX_QUEUE = 256
_MAX_QUEUE_OF_TRAINING = 16384  # reinforcement learning asks for all samples of a step at once


DESCRIPTION = (
    "Serve a model with OpenAI's endpoints and a chat page (the extra serve). Without a key, only "
    "this machine can reach it."
)
EXAMPLES = """examples:
  megatron-bridge serve HuggingFaceTB/SmolLM2-135M-Instruct
  megatron-bridge serve meta-llama/Llama-3.2-1B --adapters math=runs/lora-math --adapters chat=adapters/chat
  megatron-bridge serve runs/sft --tp 2 --host 0.0.0.0 --api-key-file key.txt
  megatron-bridge serve HuggingFaceTB/SmolLM2-135M-Instruct --train runs/service

The key can also be in the variable MEGATRON_BRIDGE_API_KEY. After SIGTERM, running requests finish first.
"""


def add_arguments(parser: Parser) -> None:
    parser.description = DESCRIPTION
    parser.epilog = EXAMPLES
    add_model_options(parser)
    parser.add_argument(
        "--adapters",
        action=NamedPaths,
        metavar="NAME=DIR",
        help="adapter and its name, which selects it as model in a request; repeatable",
    )
    parser.add_argument(
        "--adapter-root",
        type=Path,
        metavar="DIR",
        help="folder of adapters that clients may load and unload while the server runs",
    )
    parser.add_argument(
        "--max-adapters",
        type=count,
        metavar="N",
        help="adapters that may be loaded at a time with --adapter-root, or trained with --train (32)",
    )
    training = parser.add_argument_group("training service")
    training.add_argument(
        "--train",
        type=Path,
        metavar="DIR",
        help="train adapters for clients of Tinker's API instead, and save their weights in this folder",
    )
    training.add_argument("--dp", type=count, help="data-parallel size of --train (1)")
    training.add_argument("--cp", type=count, help="context-parallel size of --train (1)")
    training.add_argument(
        "--micro-batch-size",
        type=count,
        metavar="N",
        help=f"rows of a forward pass in training ({_MICRO_BATCH_SIZE})",
    )
    server = parser.add_argument_group("server")
    server.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on (127.0.0.1); others need a key",
    )
    server.add_argument(
        "--port", type=int, default=8000, help="port to listen on (8000); 0 takes a free one"
    )
    server.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="file with the key of every request"
    )
    server.add_argument(
        "--name", help="name of the model in requests (default: the last part of PATH)"
    )
    server.add_argument(
        "--max-queue",
        type=count,
        metavar="N",
        help=f"texts that may wait in the queue ({_MAX_QUEUE}, with --train {_MAX_QUEUE_OF_TRAINING})",
    )
    server.add_argument(
        "--request-timeout",
        type=count,
        metavar="S",
        help="seconds until a request is aborted (600)",
    )
    server.add_argument(
        "--drain-timeout",
        type=count,
        default=600,
        metavar="S",
        help="seconds to finish after SIGTERM (600)",
    )
    server.add_argument(
        "--otel-service-name",
        metavar="NAME",
        help="send a span of each request over OpenTelemetry's protocol (the extra otel)",
    )
    parser.add_argument(
        "--embed",
        action="store_true",
        help="return embeddings of a language model; models with a head need no option",
    )
    parser.add_argument(
        "--pooling",
        choices=["last_token", "mean"],
        help="states that make an embedding (default: as the model declares, or last_token)",
    )
    add_tool_parser(parser)


def run(args: argparse.Namespace) -> int:
    model_options.check_paths(args)
    for package in PACKAGES:
        import_optional(package, "megatron-bridge serve", "serve", is_setting=False)
    if args.otel_service_name is not None:
        name = f"--otel-service-name {args.otel_service_name}"
        import_optional("opentelemetry.sdk.trace", name, EXTRA, is_setting=False)
    if args.train is not None:
        import_optional(
            "google.protobuf", "megatron-bridge serve --train", "serve", is_setting=False
        )
    _check_options(args)
    from megatron.bridge.inference.server.run import ServeConfig, serve

    if "RANK" in os.environ:
        raise UserError(
            "serve starts its own processes: start it without torchrun, with --tp, --pp and --ep"
        )
    if not 0 <= args.port < 1 << 16:
        raise UserError(f"--port {args.port} must be from 0 to 65535: 0 takes a free one")
    if args.adapter_root is not None and not args.adapter_root.is_dir():
        raise UserError(f"--adapter-root {args.adapter_root}: there is no such folder")
    most_adapters = 0
    if args.adapter_root is not None:
        most_adapters = args.max_adapters or _MOST_ADAPTERS
    config = ServeConfig(
        name=args.name or Path(args.model).resolve().name,
        host=args.host,
        port=args.port,
        api_key=read_key(args.api_key_file),
        max_queue=args.max_queue or (_MAX_QUEUE if args.train is None else _MAX_QUEUE_OF_TRAINING),
        request_seconds=args.request_timeout or _REQUEST_SECONDS,
        drain_seconds=args.drain_timeout,
        tool_parser=args.tool_parser,
        adapter_root=args.adapter_root,
        otel_service_name=args.otel_service_name,
    )
    if args.train is not None:
        _serve_training(args, config)
        return 0
    options = {
        **model_options.llm_options(args),
        "max_adapters": most_adapters,
        "embed": args.embed,
        "pooling": args.pooling,
    }
    serve(args.model, options, config)
    return 0


_TRAINING_OPTIONS = ("dp", "cp", "micro_batch_size")
# what has no effect in a training service, or would change what it trains
_GENERATION_OPTIONS = (
    *("adapter", "adapters", "adapter_root", "template", "tool_parser", "pooling", "speculative"),
    *("speculative_tokens", "embed", "window_rings", "trust_checkpoint", "request_timeout"),
)


def _check_options(args: argparse.Namespace) -> None:
    """Refuse options that have no effect."""
    if args.train is None:
        for name in _TRAINING_OPTIONS:
            value = getattr(args, name)
            if value is not None:
                option = name.replace("_", "-")
                raise UserError(f"--{option} {value} needs --train DIR: give both")
        if args.max_adapters is not None and args.adapter_root is None:
            raise UserError(
                f"--max-adapters {args.max_adapters} needs --adapter-root DIR: give both"
            )
        return
    for name in _GENERATION_OPTIONS:
        value = getattr(args, name)
        if value:
            option = "chat-template" if name == "template" else name.replace("_", "-")
            raise UserError(f"--{option} {value} has no effect with --train: leave one out")
    if args.train.exists() and not args.train.is_dir():
        raise UserError(f"--train {args.train} is a file: give a folder")


def _serve_training(args: argparse.Namespace, config: Any) -> None:
    from megatron.bridge.training.service.run import count_processes, serve_training

    sizes = {
        "tensor_model_parallel_size": args.tp,
        "pipeline_model_parallel_size": args.pp,
        "context_parallel_size": args.cp or 1,
        "expert_model_parallel_size": args.ep,
        "expert_tensor_parallel_size": args.etp,
    }
    options = {
        "sizes": sizes,
        "dtype": args.dtype,
        "tokenizer": args.tokenizer,
        "trust_remote_code": args.trust_remote_code,
        "max_context": args.max_context,
        "max_requests": args.max_requests,
        "kv_memory": args.kv_memory,
        "prefix_reuse": args.prefix_reuse,
        "micro_batch_size": args.micro_batch_size or _MICRO_BATCH_SIZE,
        "max_adapters": args.max_adapters or _MOST_ADAPTERS,
    }
    serve_training(args.model, options, count_processes(sizes, args.dp or 1), args.train, config)


def read_key(path: Path | None) -> str | None:
    """The key, from the file or the environment; None without one."""
    source = KEY_VARIABLE if path is None else f"--api-key-file {path}"
    text = os.environ.get(KEY_VARIABLE) if path is None else read_text(path, source)
    if text is None:
        return None
    key = text.strip()
    if len(key) < _SHORTEST_KEY or not key.isascii() or any(letter.isspace() for letter in key):
        raise UserError(
            f"{source} must hold one key of at least {_SHORTEST_KEY} ASCII characters without spaces: make one "
            "with `openssl rand -hex 32`"
        )
    return key
