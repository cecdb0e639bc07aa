# SPDX-License-Identifier: Apache-2.0
"""What messages tell a user to set, to type or to call exists."""

import ast
import dataclasses
import re
import tomllib
import typing
from collections.abc import Iterator

from megatron.bridge.cli import main
from megatron.bridge.cli.support.parser import Parser
from megatron.bridge.cli.support.script_options import add_engine_options, add_script_options
from megatron.bridge.data.energon import EnergonProvider  # noqa: F401 - keys of a dataset
from megatron.bridge.models.vision.provider import VisionHybridModelProvider  # noqa: F401 - and of models
from megatron.bridge.peft.dora import DoRA  # noqa: F401 - and of adapters
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.utils.config import yaml_text
from tests.unit_tests.project.tree import ROOT

SOURCES = sorted((ROOT / "src").rglob("*.py"))
TABLES = sorted((ROOT / "src").rglob("*.yaml"))
FOREIGN = ("cli/migrate/megatron_lm", "cli/migrate/yaml_arguments", "launchers/")
"""Files that are about command lines of other programs."""
OF_OTHERS = {
    *("--help", "--nproc-per-node", "--nnodes", "--module", "--no-python"),  # torchrun's
    *("--num-layers", "--dist-ckpt-optim-fully-reshardable"),  # Megatron-LM's
    "--gpus-per-task",  # Slurm's
}


def sentences() -> Iterator[tuple[str, str]]:
    """(file, text) of every string of the package that is no docstring and has several words."""
    for path in SOURCES:
        tree = ast.parse(path.read_text())
        docs = {
            id(node.value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        }
        in_strings = {
            id(part)
            for node in ast.walk(tree)
            if isinstance(node, ast.JoinedStr)
            for part in node.values
        }
        for node in ast.walk(tree):
            text = _text_of(node, docs, in_strings)
            if " " in text.strip():
                yield str(path.relative_to(ROOT / "src/megatron/bridge")), text
    for path in TABLES:
        for text in _texts(yaml_text.read(path.read_text(), str(path))):
            if " " in text.strip():
                yield str(path.relative_to(ROOT / "src/megatron/bridge")), text


def _text_of(node, docs, in_strings):
    """The text of a string; what a format string inserts is a mark that is no name."""
    if isinstance(node, ast.JoinedStr):
        parts = (part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)
        return "".join(parts)
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return node.value if is_text and id(node) not in docs | in_strings else ""


def _texts(value):
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _texts(key)
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


SENTENCES = list(sentences())


def subclasses(kind):
    yield kind
    for child in kind.__subclasses__():
        yield from subclasses(child)


def fields_of(kind) -> set[str]:
    """Names of fields and properties of a config class and of its subclasses."""
    return {
        name
        for one in subclasses(kind)
        for name in (*(field.name for field in dataclasses.fields(one)), *vars(one))
    }


def known_keys() -> dict[str, set[str]]:
    """Block of a config -> its keys, for every class that the block may have."""
    found = {}
    for block, hint in typing.get_type_hints(ConfigContainer).items():
        kinds = [one for one in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(one)]
        if kinds:
            found[block] = set().union(*map(fields_of, kinds))
    return found


KEYS = known_keys()
KEY = re.compile(rf"(?<![\w./:@\0-])({'|'.join(KEYS)})\.([A-Za-z_]\w*)(?![\w.*(\0]|\])")


def test_every_key_in_a_message_is_one_of_the_config():
    wrong = {
        (file, match[0])
        for file, text in SENTENCES
        for match in KEY.finditer(text)
        if match[2] not in KEYS[match[1]]
    }
    assert not wrong


OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*[a-z0-9](?![\w*]|-\0)")


def options_of_command(name: str) -> set[str]:
    _, parsers = main.make_parsers(name, main._load(name))
    return main.option_names(parsers[name])


OPTIONS = {command: options_of_command(command) for command in main.COMMANDS}


def options_of_scripts() -> set[str]:
    """Options of the scripts of the inference API."""
    parser = Parser()
    add_script_options(parser)
    add_engine_options(parser)
    return main.option_names(parser)


OF_SCRIPTS = options_of_scripts()


def options_for(file: str) -> set[str]:
    """Options that a message of a file may name: a command's own, or those of all commands."""
    command = file.removeprefix("cli/").removesuffix(".py").replace("_", "-")
    if file.startswith("cli/") and command in OPTIONS:
        return OPTIONS[command] | OPTIONS["train"]  # a message may also name the command to run
    return set().union(OF_SCRIPTS, *OPTIONS.values())


def test_every_option_in_a_message_is_one_of_a_command():
    assert "--overwrite" in options_for("cli/export.py")
    wrong = {
        (file, match[0])
        for file, text in SENTENCES
        for match in OPTION.finditer(text)
        if not file.startswith(FOREIGN) and match[0] not in options_for(file) | OF_OTHERS
    }
    assert not wrong


COMMAND = re.compile(r"`megatron-bridge ([a-z][a-z-]+)")


def test_every_command_in_a_message_is_there():
    named = {(file, match[1]) for file, text in SENTENCES for match in COMMAND.finditer(text)}
    assert named
    assert not {(file, name) for file, name in named if name not in main.COMMANDS}


def test_no_message_names_a_file_of_the_checkout():
    """An installed package has no scripts, examples or tests."""
    place = re.compile(r"(?<![\w./])(scripts|examples|tests|tutorials)/\w")
    assert not {(file, text) for file, text in SENTENCES if place.search(text)}


def test_every_extra_in_a_message_is_there():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {
        name
        for _, text in SENTENCES
        for match in re.finditer(r"hf-megatron-bridge\[([\w,-]+)\]", text)
        for name in match[1].split(",")
    }
    assert named
    assert named <= extras["optional-dependencies"].keys()


def test_a_page_in_a_message_is_there():
    pages = {match for _, text in SENTENCES for match in re.findall(r"\bdocs/[\w/-]+\.md", text)}
    assert pages
    assert not {page for page in pages if not (ROOT / page).is_file()}
