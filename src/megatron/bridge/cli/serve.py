# SPDX-License-Identifier: Apache-2.0
"""``megatron-bridge serve``: a server with OpenAI's endpoints, for any checkpoint, under any layout."""

import argparse
import os
from pathlib import Path

from megatron.bridge.cli.support import model_options
from megatron.bridge.utils.atomic import read_text
from megatron.bridge.utils.errors import UserError
from megatron.bridge.utils.optional_imports import import_optional

KEY_VARIABLE = "MEGATRON_BRIDGE_API_KEY"
PACKAGES = ("fastapi", "uvicorn", "prometheus_client")
_SHORTEST_KEY = 16


def run(args: argparse.Namespace) -> int:
    model_options.check_paths(args)
    for package in PACKAGES:
        import_optional(package, "megatron-bridge serve", "serve", is_setting=False)
    from megatron.bridge.inference.server.run import ServeConfig, serve

    if "RANK" in os.environ:
        raise UserError(
            "serve starts its own processes: start it without torchrun, with --tp, --pp and --ep"
        )
    if not 0 <= args.port < 1 << 16:
        raise UserError(f"--port {args.port} must be from 0 to 65535: 0 takes a free one")
    config = ServeConfig(
        name=args.name or Path(args.model).resolve().name,
        host=args.host,
        port=args.port,
        api_key=read_key(args.api_key_file),
        max_queue=args.max_queue,
        request_seconds=args.request_timeout,
        drain_seconds=args.drain_timeout,
        tool_parser=args.tool_parser,
    )
    serve(args.model, model_options.llm_options(args), config)
    return 0


def read_key(path: Path | None) -> str | None:
    """The key, from the file or the environment; None without one."""
    where = KEY_VARIABLE if path is None else f"--api-key-file {path}"
    text = os.environ.get(KEY_VARIABLE) if path is None else read_text(path, where)
    if text is None:
        return None
    key = text.strip()
    if len(key) < _SHORTEST_KEY or not key.isascii() or any(letter.isspace() for letter in key):
        raise UserError(
            f"{where} must hold one key of at least {_SHORTEST_KEY} ASCII characters without spaces: make one "
            "with `openssl rand -hex 32`"
        )
    return key
