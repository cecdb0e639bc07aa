# SPDX-License-Identifier: Apache-2.0
"""``megatron-bridge from-trainer``: settings of other trainers as settings on top of a recipe."""

import argparse
import shlex
import sys
from pathlib import Path

from megatron.bridge.cli.support.parser import count
from megatron.bridge.utils.errors import UserError

DESCRIPTION = (
    "Translate a YAML or JSON file of TrainingArguments, TRL, axolotl or LLaMA-Factory to settings for "
    "`train --recipe NAME --config`. Each key is listed with the setting that it becomes, or with the reason why "
    "it has no counterpart; the last line is the command to run."
)
EXAMPLES = """example:
  megatron-bridge from-trainer axolotl.yaml --recipe llama32_1b_finetune_config --output settings.yaml
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, metavar="FILE", help="YAML or JSON file of the other trainer")
    parser.add_argument("--recipe", metavar="NAME", default="RECIPE", help="recipe for the command that is printed")
    parser.add_argument("--output", type=Path, metavar="FILE", help="YAML file to write (default: print it)")
    parser.add_argument(
        "--ranks", type=count, default=1, metavar="N", help="data-parallel ranks, for the batch size (default: 1)"
    )


def run(args: argparse.Namespace) -> int:
    from megatron.bridge.cli.migrate.trainer import translate
    from megatron.bridge.utils.atomic import read_text
    from megatron.bridge.utils.config import yaml_text

    values = yaml_text.read(read_text(args.source, str(args.source)), str(args.source))
    if not isinstance(values, dict):
        raise UserError(f"{args.source} holds no settings: give a file with key: value lines")
    found = translate(values, args.ranks)
    text = yaml_text.write({key: yaml_text.read(value) for key, value in found.translation.settings.items()})
    found.translation.show(text, args.output)
    options = [word for name, value in found.options.items() for word in (f"--{name}", value) if word]
    file = str(args.output or "FILE")
    words = ["megatron-bridge", "train", "--recipe", args.recipe, "--config", file, *options]
    sys.stderr.write(f"{shlex.join(words)}\n")
    return 0
