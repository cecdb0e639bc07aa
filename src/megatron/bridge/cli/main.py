# SPDX-License-Identifier: Apache-2.0
"""The ``megatron-bridge`` command.

A command is a module of this package with ``add_arguments(parser)``, which declares its options, and
``run(args) -> int``, which returns the exit code. Only the module of the given command is imported, and it imports
torch and what needs torch inside its functions. So ``--help`` and errors in arguments are quick, and a module that
cannot be imported does not break the other commands.
"""

import argparse
import importlib
import re
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron.bridge.cli.support.exit_code import exit_code, refuse_other_distribution
from megatron.bridge.cli.support.output_files import check_outputs
from megatron.bridge.cli.support.parser import Parser, location_options
from megatron.bridge.utils.errors import UserError, did_you_mean
from megatron.bridge.utils.startup import announce_slow_imports, skip_gc_at_exit
from megatron.bridge.utils.storage_paths import split
from megatron.bridge.utils.torchrun_env import adopt_slurm_step, read_number
from megatron.bridge.version import __version__

COMMANDS = {
    "train": "pretrain or fine-tune a model from a recipe",
    "launch": "start a recipe on this machine or on a Slurm cluster, or write it for Kubernetes",
    "tune": "find the fastest parallel layout that fits, without a GPU",
    "generate": "continue prompts with any checkpoint",
    "chat": "chat with any checkpoint",
    "serve": "serve any checkpoint with OpenAI's endpoints",
    "eval": "evaluate any checkpoint with lm-evaluation-harness",
    "convert": "convert a Hugging Face model to a Megatron checkpoint",
    "export": "convert a Megatron checkpoint to a Hugging Face model",
    "plan": "show which tensor becomes which parameter, without reading weights",
    "port": "draft the bridge of an architecture that is not supported yet",
    "inspect": "show the contents of a Hugging Face or Megatron checkpoint",
    "calibrate": "quantize a model, calibrated on your texts by llm-compressor",
    "prune": "make a smaller model from a trained one",
    "upcycle": "make a mixture of experts from a dense model",
    "verify": "prove that a Megatron checkpoint equals a Hugging Face model",
    "checkpoint": "list, inspect, verify, compare or convert Megatron checkpoints",
    "from-megatron-lm": "translate a command line of Megatron-LM to a config",
    "from-trainer": "translate settings of the Trainer, axolotl or LLaMA-Factory",
    "adapter": "merge adapters, subtract them again, or write them for peft",
    "data": "prepare training data, and preview it",
    "watch": "show a run in the terminal while it trains: curves, speed, expected end, checkpoints",
    "plot": "plot loss and throughput of one or several runs",
    "doctor": "show what this machine has, which kernels a run uses on it, and how fast it is",
    "trace": "merge the profiler traces of all ranks into one",
}
"""Each command with its line in ``--help``, in that order. ``from-trainer`` is the module ``from_trainer``."""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else list(argv)
    with skip_gc_at_exit():
        return exit_code(lambda: _run(arguments))


def _run(arguments: list[str]) -> int:
    refuse_other_distribution()
    adopt_slurm_step()
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        read_number(variable, 0)
    name = next((word for word in arguments if not word.startswith("-")), None)
    module = _load(name) if name in COMMANDS else None
    parser, command_parsers = make_parsers(name, module)
    if name is not None and name not in COMMANDS:
        hint = did_you_mean(name, COMMANDS) or "; --help lists them"
        parser.error(f"there is no command {name}{hint}")
    args, unknown = parser.parse_known_args(arguments)
    if unknown and not take_overrides(args, unknown):
        _refuse_unknown(command_parsers.get(name, parser), unknown)
    if module is None:
        parser.print_help()
        return 2
    announce_slow_imports()
    _use_local_folders(args, location_options(command_parsers[name]))
    check_outputs(str(name), args)
    if not getattr(args, "trust_checkpoint", False):
        return module.run(args)
    from megatron.bridge.utils import unpickling  # imports torch

    with unpickling.trusting(True):
        return module.run(args)


def _use_local_folders(args: argparse.Namespace, locations: Collection[str]) -> None:
    """Replace URLs of object storage in the arguments.

    Args:
        args: The arguments, which change in place.
        locations: Names of the options that take URLs; those in other options are refused.
    """
    for name, value in vars(args).items():
        url_parts = split(value) if isinstance(value, (str, Path)) else None
        if url_parts is None:
            continue
        from megatron.bridge.utils import storage

        if name in locations:
            setattr(args, name, type(value)(storage.local("://".join(url_parts))))
        elif storage.is_url(value):
            raise UserError(f"{name}={value} cannot be a URL: give a local path")


def _load(name: str) -> ModuleType:
    try:
        return importlib.import_module(f"megatron.bridge.cli.{name.replace('-', '_')}")
    except ModuleNotFoundError as error:
        missing = error.name or str(error)
        raise UserError(
            f"megatron-bridge {name} cannot run: install the missing module {missing}"
        ) from error


def make_parsers(
    name: str | None, module: ModuleType | None
) -> tuple[argparse.ArgumentParser, dict[str | None, argparse.ArgumentParser]]:
    """Return the parser of ``megatron-bridge``, and those of all commands by name.

    Args:
        name: Command whose options are added; the other commands have none.
        module: Module of this command, or None without a command.
    """
    parser = Parser(
        prog="megatron-bridge",
        description="Convert Hugging Face models to Megatron-Core and back, and train them under any layout.",
        formatter_class=_format_commands,
    )
    parser.add_argument("--version", action="version", version=f"megatron-bridge {__version__}")
    subparsers: Any = parser.add_subparsers(dest="command", metavar="COMMAND")
    for command, summary in COMMANDS.items():
        subparsers.add_parser(command, help=summary)
    if module is not None:
        module.add_arguments(subparsers.choices[name])
    return parser, subparsers.choices


def _format_commands(prog: str) -> argparse.HelpFormatter:
    """One line per command: argparse does not count the indentation of their names."""
    formatter = argparse.HelpFormatter(prog)
    formatter._action_max_length = max(map(len, COMMANDS)) + 4
    return formatter


def take_overrides(args: argparse.Namespace, unknown: list[str]) -> bool:
    """Add ``key=value`` words that follow an option; argparse accepts only one uninterrupted group of them."""
    overrides = getattr(args, "overrides", None)
    if overrides is None or any(word.startswith("-") for word in unknown):
        return False
    overrides.extend(unknown)
    return True


def _refuse_unknown(parser: argparse.ArgumentParser, unknown: list[str]) -> None:
    """End the command, and name the option that the first of the unknown words may mean."""
    word = unknown[0]
    override = re.fullmatch(r"--?([a-z_]\w*(?:\.\w+)+=.*)", word)
    if override is not None:
        hint = f"; write an override without dashes: {override[1]}"
    else:
        hint = did_you_mean(word, option_names(parser) - {"-h", "--help"})
    parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")


def option_names(parser: argparse.ArgumentParser) -> set[str]:
    """Return the options of a command and of its subcommands, with their dashes."""
    names = set(parser._option_string_actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for subparser in action.choices.values():
                names |= option_names(subparser)
    return names


if __name__ == "__main__":
    sys.exit(main())
