# SPDX-License-Identifier: Apache-2.0
"""A server with OpenAI's endpoints, under the Megatron Bridge API's options; ``megatron-bridge serve`` has more.

``python openai_server.py --hf_model_path ID [--megatron_model_path DIR] [--host HOST] [--port PORT]``
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.bridge.cli import serve
from megatron.bridge.cli.support.exit_code import exit_code
from megatron.bridge.cli.support.parser import Parser
from megatron.bridge.cli.support.script_options import (
    add_engine_options,
    add_script_options,
    script_engine,
    script_model,
)
from megatron.bridge.utils.optional_imports import import_optional

WITHOUT_EFFECT = {
    "--max_new_tokens": "each request says how many it wants",
    "--enable-chunked-prefill": "prompts are always computed in chunks",
    "--cache-mla-latents": "latents are always cached",
}


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    """Read the options."""
    parser = Parser(description=__doc__)
    add_script_options(parser)
    add_engine_options(parser)
    parser.set_defaults(max_new_tokens=None)
    parser.add_argument(
        "--host", default="127.0.0.1", help="others than this machine's need --api-key-file"
    )
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--api-key-file", type=Path, metavar="FILE")
    for name, reason in list(WITHOUT_EFFECT.items())[1:]:
        parser.add_argument(name, action="store_true", help=f"no effect: {reason}")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Serve until SIGTERM."""
    args = parsed(argv)
    for name, reason in WITHOUT_EFFECT.items():
        if getattr(args, name.strip("-").replace("-", "_")):
            sys.stderr.write(f"note: {name} has no effect: {reason}\n")
    path, options = script_model(args)
    for package in serve.PACKAGES:
        import_optional(package, "openai_server.py", "serve", is_setting=False)
    from megatron.bridge.inference.server.run import ServeConfig
    from megatron.bridge.inference.server.run import serve as run_server

    options |= script_engine(args)
    name = Path(args.hf_model_path or path).name
    key = serve.read_key(args.api_key_file)
    run_server(path, options, ServeConfig(name, args.host, args.port, key))
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(lambda: main(sys.argv[1:])))
