# SPDX-License-Identifier: Apache-2.0
"""The ``megatron-bridge`` command.

Each subcommand has its texts and options in ``main.yaml``, and a module of this package with ``run(args) -> int``.
Only the requested module is imported, so ``--help`` is quick, and a module that cannot be imported does not break the
others.
"""

import argparse
import importlib
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron.bridge.cli.support import output_files
from megatron.bridge.cli.support.exit_code import exit_code, refuse_other_distribution
from megatron.bridge.cli.support.parser import Parser, add_options
from megatron.bridge.utils.config import yaml_text
from megatron.bridge.utils.errors import UserError, did_you_mean
from megatron.bridge.utils.startup import skip_gc_at_exit
from megatron.bridge.utils.storage_paths import split
from megatron.bridge.utils.torchrun_env import adopt_slurm_step, read_number
from megatron.bridge.version import __version__

SUBCOMMANDS = yaml_text.tables_beside(__file__)


# the options that can be URLs of object storage
URLS = {
    "megatron_path",
    "hf_path",
    "hf_model",
    "adapter",
    "model",
    "path",
    "first",
    "second",
    "target",
}

# the options that name a file to write
OUTPUT_FILES = {"out", "output", "timeline", "messages", "certificate"}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else list(argv)
    with skip_gc_at_exit():
        return exit_code(lambda: _run(arguments))


def _run(arguments: list[str]) -> int:
    refuse_other_distribution()
    adopt_slurm_step()
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        read_number(variable, 0)
    name = next((item for item in arguments if not item.startswith("-")), None)
    module = _load(name) if name in SUBCOMMANDS else None
    parser, commands = _parsers(name)
    if name is not None and name not in SUBCOMMANDS:
        parser.error(
            f"there is no command {name}{did_you_mean(name, SUBCOMMANDS) or '; --help lists them'}"
        )
    args, extra = parser.parse_known_args(arguments)
    if extra and not _take_overrides(args, extra):
        command = commands.get(name, parser)
        hint = _without_dashes(extra[0]) or did_you_mean(
            extra[0], _options(command) - {"-h", "--help"}
        )
        command.error(f"unrecognized arguments: {' '.join(extra)}{hint}")
    if module is None:
        parser.print_help()
        return 2
    _use_local_folders(args)
    _refuse_writing_over_inputs(args)
    output_files.refuse_unrelated_files(str(name), args)
    if not getattr(args, "trust_checkpoint", False):
        return module.run(args)
    from megatron.bridge.utils import unpickling  # imports torch

    with unpickling.trusting(True):
        return module.run(args)


def _use_local_folders(args: argparse.Namespace) -> None:
    """Replace URLs of object storage in the arguments, and refuse those that are not read or written there."""
    for name, value in vars(args).items():
        if not isinstance(value, (str, Path)) or (found := split(value)) is None:
            continue
        from megatron.bridge.utils import storage

        if name in URLS:
            setattr(args, name, type(value)(storage.local("://".join(found))))
        elif storage.is_url(value):
            raise UserError(f"{name}={value} cannot be a URL: give a local path")


def _refuse_writing_over_inputs(args: argparse.Namespace) -> None:
    """Refuse an output file that is also one of the files that the command reads."""
    values = vars(args)
    for output_name in OUTPUT_FILES & values.keys():
        output = values[output_name]
        if output is None or not Path(output).exists():
            continue
        for name, value in values.items():
            for item in value if isinstance(value, (list, tuple)) else [value]:
                if name not in OUTPUT_FILES and _is_same_file(item, Path(output)):
                    raise UserError(
                        f"--{output_name} {output} is also what the command reads as {name}, and would be "
                        "overwritten: choose another file"
                    )


def _is_same_file(value: Any, output: Path) -> bool:
    if not isinstance(value, (str, Path)):
        return False
    try:
        return Path(value).samefile(output)
    except (OSError, ValueError):  # not a path, or no file
        return False


def _load(name: str) -> ModuleType:
    try:
        return importlib.import_module(f"megatron.bridge.cli.{name.replace('-', '_')}")
    except ModuleNotFoundError as error:
        missing = error.name or str(error)
        raise UserError(
            f"megatron-bridge {name} cannot run: install the missing module {missing}"
        ) from error


def _parsers(
    name: str | None,
) -> tuple[argparse.ArgumentParser, dict[str | None, argparse.ArgumentParser]]:
    """Return the parser of the command and the parsers of its subcommands; only subcommand ``name`` gets options."""
    parser = Parser(
        prog="megatron-bridge",
        description="Convert Hugging Face models to Megatron-Core and back, and train them under any layout.",
        formatter_class=_formatter,
    )
    parser.add_argument("--version", action="version", version=f"megatron-bridge {__version__}")
    subparsers: Any = parser.add_subparsers(dest="command", metavar="COMMAND")
    for command, entry in SUBCOMMANDS.items():
        chosen = subparsers.add_parser(command, help=entry["help"])
        if command == name:
            describe(chosen, entry)
    return parser, subparsers.choices


def describe(parser: argparse.ArgumentParser, entry: dict[str, Any]) -> None:
    """Give ``parser`` the texts, options and subcommands of a command."""
    parser.description, parser.epilog = entry.get("description"), entry.get("epilog")
    add_options(parser, entry.get("options", {}))
    if "subcommands" in entry:
        subparsers = parser.add_subparsers(dest="subcommand", required=True, metavar="COMMAND")
        for name, each in entry["subcommands"].items():
            describe(subparsers.add_parser(name, help=each["help"]), each)


def _options(parser: argparse.ArgumentParser) -> set[str]:
    found = set(parser._option_string_actions)
    deeper = (
        action.choices
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    return found.union(*(_options(child) for choices in deeper for child in choices.values()))


def _formatter(prog: str) -> argparse.HelpFormatter:
    """One line per command: argparse does not count the indentation of their names."""
    formatter = argparse.HelpFormatter(prog)
    formatter._action_max_length = max(map(len, SUBCOMMANDS)) + 4
    return formatter


def _without_dashes(word: str) -> str:
    """A hint for an override that was written like an option."""
    found = re.fullmatch(r"--?([a-z_]\w*(?:\.\w+)+=.*)", word)
    return f"; write an override without dashes: {found[1]}" if found else ""


def _take_overrides(args: argparse.Namespace, extra: list[str]) -> bool:
    """Add ``key=value`` items that follow an option; argparse accepts only one uninterrupted group of them."""
    overrides = getattr(args, "overrides", None)
    if overrides is None or any(item.startswith("-") for item in extra):
        return False
    overrides.extend(extra)
    return True


if __name__ == "__main__":
    sys.exit(main())
