# SPDX-License-Identifier: Apache-2.0
"""``megatron-bridge from-megatron-lm``: a command line of Megatron-LM as a config."""

import argparse
from pathlib import Path

from megatron.bridge.cli.migrate.shell_script import ShellScript
from megatron.bridge.cli.support.output_files import YamlFile
from megatron.bridge.cli.support.parser import Parser, count
from megatron.bridge.utils.atomic import read_text
from megatron.bridge.utils.errors import UserError

DESCRIPTION = (
    "Translate a command line of Megatron-LM's pretrain_gpt.py to a config for `train --config`. "
    "Each argument is listed with the setting that it becomes, or with the reason why it has no "
    "counterpart."
)
EXAMPLES = r"""examples:
  megatron-bridge from-megatron-lm "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 32 ..." \
      --output run.yaml
  megatron-bridge from-megatron-lm "train_gpt3_175b_distributed.sh checkpoints logs vocab.json merges.txt data"
  megatron-bridge train --config run.yaml --dry-run
"""


def add_arguments(parser: Parser) -> None:
    parser.description = DESCRIPTION
    parser.epilog = EXAMPLES
    parser.add_argument(
        "source",
        metavar="COMMAND",
        help="the command line as one word, a file with it, or a shell script with its arguments",
    )
    parser.add_argument(
        "--output", type=YamlFile, metavar="FILE", help="YAML file to write (default: print it)"
    )
    parser.add_argument(
        "--overrides",
        action="store_true",
        help="print dotted overrides for a recipe, one per line, instead of a complete config",
    )
    parser.add_argument(
        "--world-size",
        type=count,
        metavar="N",
        help="processes of the run (default: those of torchrun)",
    )


def run(args: argparse.Namespace) -> int:
    command = _command(args.source)  # before anything slow is imported
    from megatron.bridge.cli.migrate.megatron_lm import translate

    translated = translate(command, args.world_size)
    from megatron.bridge.cli.migrate.megatron_lm_config import build

    text = (
        "".join(f"{line}\n" for line in translated.translation.overrides())
        if args.overrides
        else build(translated).to_yaml()
    )
    translated.translation.show("from-megatron-lm", text, args.output)
    return 0


def _command(source: str) -> str:
    """Return a command line: the given one, or that of a file, which may be a shell script."""
    words = source.split()
    path = Path(words[0] if words else source)
    if not path.is_file():
        if "--" in source:
            return source
        raise UserError(
            f"{source} is neither a command line nor a file: give the command line in quotes, with its arguments"
        )
    text = read_text(path, str(path))
    if path.suffix in (".sh", ".slurm", ".sbatch") or text.startswith("#!"):
        return ShellScript(text, path.name, words[1:]).command()
    return text
