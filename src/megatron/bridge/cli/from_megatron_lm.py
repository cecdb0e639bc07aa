# SPDX-License-Identifier: Apache-2.0
"""``megatron-bridge from-megatron-lm``: a command line of Megatron-LM as a config."""

import argparse
from pathlib import Path

from megatron.bridge.utils.atomic import read_text
from megatron.bridge.utils.errors import UserError


def run(args: argparse.Namespace) -> int:
    command = _command(args.source)  # before anything slow is imported
    from megatron.bridge.cli.migrate.megatron_lm import translate

    found = translate(command, args.world_size)
    from megatron.bridge.cli.migrate.megatron_lm_config import build

    text = (
        "".join(f"{line}\n" for line in found.translation.overrides())
        if args.overrides
        else build(found).to_yaml()
    )
    found.translation.show("from-megatron-lm", text, args.output)
    return 0


def _command(source: str) -> str:
    if "--" in source:
        return source
    if not Path(source).is_file():
        raise UserError(
            f"{source} is neither a command line nor a file: give the command line in quotes, with its arguments"
        )
    return read_text(Path(source), source)
