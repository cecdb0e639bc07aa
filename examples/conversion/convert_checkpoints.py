# SPDX-License-Identifier: Apache-2.0
"""Convert a checkpoint between Hugging Face and Megatron format, bit for bit.

``python convert_checkpoints.py import --hf-model ID --megatron-path DIR``
``python convert_checkpoints.py export --hf-model ID --megatron-path DIR --hf-path OUT``
"""

import sys
from collections.abc import Sequence

from megatron.bridge.cli import convert, export
from megatron.bridge.cli.main import COMMANDS
from megatron.bridge.cli.support.exit_code import exit_code
from megatron.bridge.cli.support.parser import Parser


def main(argv: Sequence[str]) -> int:
    """Run ``import`` or ``export``. Options without either mean ``import``."""
    parser = Parser(
        description="Convert a checkpoint between Hugging Face and Megatron format, bit for bit."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, command, module in (("import", "convert", convert), ("export", "export", export)):
        subparser = commands.add_parser(name, help=COMMANDS[command])
        module.add_arguments(subparser)
        subparser.set_defaults(run=module.run)
    arguments = list(argv)
    if arguments and arguments[0].startswith("--") and arguments[0] != "--help":
        arguments.insert(0, "import")
    args = parser.parse_args(arguments)
    return args.run(args)


if __name__ == "__main__":
    sys.exit(exit_code(lambda: main(sys.argv[1:])))
