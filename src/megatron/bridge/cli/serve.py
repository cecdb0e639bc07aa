# SPDX-License-Identifier: Apache-2.0
"""``megatron-bridge serve``: a server with OpenAI's endpoints, for any checkpoint, under any layout."""

import argparse
import os
from pathlib import Path

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
_MOST_ADAPTERS = 32  # loaded at a time


DESCRIPTION = (
    "Serve a model with OpenAI's endpoints and a chat page (the extra serve). Without a key, only "
    "this machine can reach it."
)
EXAMPLES = """examples:
  megatron-bridge serve HuggingFaceTB/SmolLM2-135M-Instruct
  megatron-bridge serve meta-llama/Llama-3.2-1B --adapters math=runs/lora-math --adapters chat=adapters/chat
  megatron-bridge serve runs/sft --tp 2 --host 0.0.0.0 --api-key-file key.txt

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
        help="adapters that may be loaded at a time with --adapter-root (32)",
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
        default=256,
        metavar="N",
        help="texts that may wait in the queue (256)",
    )
    server.add_argument(
        "--request-timeout",
        type=count,
        default=600,
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
    from megatron.bridge.inference.server.run import ServeConfig, serve

    if "RANK" in os.environ:
        raise UserError(
            "serve starts its own processes: start it without torchrun, with --tp, --pp and --ep"
        )
    if not 0 <= args.port < 1 << 16:
        raise UserError(f"--port {args.port} must be from 0 to 65535: 0 takes a free one")
    if args.max_adapters is not None and args.adapter_root is None:
        raise UserError(f"--max-adapters {args.max_adapters} needs --adapter-root DIR: give both")
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
        max_queue=args.max_queue,
        request_seconds=args.request_timeout,
        drain_seconds=args.drain_timeout,
        tool_parser=args.tool_parser,
        adapter_root=args.adapter_root,
        otel_service_name=args.otel_service_name,
    )
    options = {
        **model_options.llm_options(args),
        "max_adapters": most_adapters,
        "embed": args.embed,
        "pooling": args.pooling,
    }
    serve(args.model, options, config)
    return 0


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
