# SPDX-License-Identifier: Apache-2.0
"""What the documentation shows exists: commands parse, recipes and imported names are there, links lead somewhere.

The README's commands are really run, in tests/functional_tests/project.
"""

import argparse
import ast
import importlib
import re
import shlex
import tomllib

import pytest

from tests.unit_tests.project.tree import ROOT, tracked

PAGES = [*tracked("*.md")]
RUN_RECIPE = "scripts/training/run_recipe.py"


def blocks(page, language):
    """Fenced blocks of a page."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def command_lines():
    """Every shell command of every page, continuation lines joined, with where it stands."""
    for page in PAGES:
        for block in blocks(page, "bash"):
            for line in block.replace("\\\n", " ").splitlines():
                if words := shlex.split(line, comments=True):
                    yield pytest.param(words, id=f"{page.name}: {' '.join(words)[:60]}")


def of_our_command(words):
    """The arguments of ``megatron-bridge``, whichever way it is started; None for another program."""
    if words[0] == "megatron-bridge":
        return words[1:]
    if RUN_RECIPE in words:
        return ["train", *words[words.index(RUN_RECIPE) + 1 :]]
    return None


@pytest.mark.parametrize("words", command_lines())
def test_commands_parse(words):
    if (arguments := of_our_command(words)) is None:
        assert words[0] in {"make", "uv", "python", "tensorboard", "."}, "a program that the page does not explain"
        return
    args = parse(arguments)
    if getattr(args, "recipe", None):
        from megatron.bridge.recipes.catalog import find

        assert find(args.recipe)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    importlib.import_module(f"megatron.bridge.cli.{arguments[0]}").add_parser(parser.add_subparsers())
    args, extra = parser.parse_known_args(arguments)
    assert all(re.fullmatch(r"[\w.]+=.*", item) for item in extra), "settings may stand anywhere, nothing else"
    return args


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_import_what_exists(page):
    for block in blocks(page, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom):
                module = importlib.import_module(node.module)
                missing = [alias.name for alias in node.names if not hasattr(module, alias.name)]
                assert not missing
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    importlib.import_module(alias.name)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
    broken = [target for target in targets if "://" not in target and not (page.parent / target).exists()]
    assert not broken


def test_files_that_pages_name_exist():
    named = {
        (page, path)
        for page in PAGES
        for path in re.findall(r"`((?:tests|scripts|examples|benchmarks|docs)/[\w./-]+\.\w+)`", page.read_text())
    }
    assert sorted(f"{page.name}: {path}" for page, path in named if not (ROOT / path).exists()) == []


def test_navigation_names_every_page():
    navigation = (ROOT / "mkdocs.yml").read_text()
    pages = [str(page.relative_to(ROOT / "docs")) for page in tracked("docs/*.md")]
    assert [page for page in pages if page not in navigation] == []


def test_version_of_python_is_the_projects():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=3.12,<3.13"
    assert "Python 3.12" in (ROOT / "README.md").read_text()
