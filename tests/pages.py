# SPDX-License-Identifier: Apache-2.0
"""Fenced blocks of Markdown pages, and what a test does with each.

``python`` blocks are executed in their order, one namespace a page; ``bash`` blocks are dry-run: every option is
parsed by the program's own parser, recipes are built and their settings applied and validated; ``yaml`` blocks are
applied as settings. A comment above a block, which the site does not show, says otherwise:

* ``<!-- check: run -->``: a ``bash`` block is executed, at toy size;
* ``<!-- check: dry-run -->``: a ``python`` block is compiled, and its imports, names and keywords are looked up;
* ``<!-- check: tests/.../test_x.py -->``: that test executes the block.

``text`` and ``console`` are what a program prints. Any other language is refused.
"""

import ast
import builtins
import contextlib
import importlib
import importlib.util
import inspect
import re
import shlex
import textwrap
from dataclasses import dataclass
from pathlib import Path

from tests.unit_tests.project.tree import ROOT, tracked

FENCE = re.compile(
    r"^(?:[ ]*<!--[ ]check:[ ](?P<mark>\S+)[ ]-->\n)?"
    r"(?P<indent>[ ]*)```(?P<language>\w*)[ ]*(?P<info>[^\n]*)\n(?P<text>.*?)^(?P=indent)```$",
    flags=re.MULTILINE | re.DOTALL,
)
NOT_CODE = ("text", "console")
# language -> what is done without a mark, and with which marks
WAYS = {"python": ("run", "dry-run"), "bash": ("dry-run", "run"), "yaml": ("dry-run",)}


@dataclass(frozen=True)
class Block:
    """One fenced block.

    Attributes:
        page: The file that it is in.
        line: Number of the line of its fence, from 1.
        language, title: From the fence.
        mark: What the comment above it asks for; empty without one.
        text: Its lines, without the indentation of the fence.
    """

    page: Path
    line: int
    language: str
    title: str
    mark: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def way(self) -> str:
        """``run``, ``dry-run``, ``text``, or the test that executes it.

        Raises:
            ValueError: nothing would look at the block.
        """
        if self.language in NOT_CODE and not self.mark:
            return "text"
        if self.mark.startswith("tests/"):
            self._check_test()
            return self.mark
        ways = WAYS.get(self.language, ())
        if not ways or self.mark not in ("", *ways):
            asked = f" with the mark {self.mark}" if self.mark else ""
            raise ValueError(
                f"{self.name}: a block of {self.language or 'no language'}{asked} is not checked"
            )
        return self.mark or ways[0]

    def _check_test(self) -> None:
        test = ROOT / self.mark
        named = (self.page.name, self.title) if self.title else (self.page.name,)
        if not test.exists() or not all(name in test.read_text() for name in named):
            raise ValueError(
                f"{self.name}: {self.mark} does not execute it: there is no {' or '.join(named)}"
            )

    def commands(self) -> list[list[str]]:
        """The words of each command, without variables set before it, comments and redirections."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [words for line in lines for words in _commands(line)]


def _commands(line):
    lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;>")
    lexer.whitespace_split = True
    words, redirected = [], False
    for word in [*lexer, ";"]:
        if set(word) <= set("&|;"):
            if words:
                yield words
            words, redirected = [], False
        elif set(word) <= set(">"):
            redirected = True
        elif not redirected and (words or not re.match(r"[A-Z_]+=", word)):
            words.append(word)


def pages() -> list[Path]:
    """Every Markdown page of the repository."""
    return tracked("*.md")


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order.

    Raises:
        ValueError: a fence is not closed, or stands where it is not recognised.
    """
    text = page.read_text()
    found = [
        Block(
            page,
            text.count("\n", 0, match.start("indent")) + 1,
            match["language"],
            _title(match["info"]),
            match["mark"] or "",
            textwrap.dedent(match["text"]),
        )
        for match in FENCE.finditer(text)
    ]
    if len(re.findall(r"^ *```", text, flags=re.MULTILINE)) != 2 * len(found):
        raise ValueError(f"{page}: a fence is not closed, or is closed at another indentation")
    if text.count("<!-- check:") != sum(bool(block.mark) for block in found):
        raise ValueError(f"{page}: a mark does not stand right above its block")
    return found


def _title(info):
    found = re.search(r'title="(.*?)"', info)
    return found[1] if found else ""


CLIENTS = ("openai", "tinker")
"""Packages of clients in pages, which only an extra installs."""


def undefined_names(source: list[Block]) -> list[str]:
    """Names that ``python`` blocks of a page use and never define, import, or get as a parameter."""
    tree = ast.parse("\n".join(block.text for block in source))
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    known = {node.id for node in names if not isinstance(node.ctx, ast.Load)} | set(dir(builtins))
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
            known.add(node.name)
        elif isinstance(node, ast.arg):
            known.add(node.arg)
        elif isinstance(node, ast.alias):
            known.add((node.asname or node.name).partition(".")[0])
    return sorted({node.id for node in names} - known - {"__name__", "__file__"})


def wrong_keywords(source: list[Block]) -> list[str]:
    """Imports that do not exist, and keywords that an imported callable does not take."""
    tree = ast.parse("\n".join(block.text for block in source))
    imported, wrong = {}, []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                importlib.import_module(alias.name)
        elif isinstance(node, ast.ImportFrom):
            if node.module in CLIENTS and importlib.util.find_spec(node.module) is None:
                continue  # another test runs the block where the extra is installed
            module = importlib.import_module(node.module)
            for alias in node.names:
                with contextlib.suppress(
                    ImportError
                ):  # a submodule is an attribute only after its import
                    importlib.import_module(f"{node.module}.{alias.name}")
                if hasattr(module, alias.name):
                    imported[alias.asname or alias.name] = getattr(module, alias.name)
                else:
                    wrong.append(f"{node.module}.{alias.name}")
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    ]
    return wrong + [name for call in calls for name in _wrong(call, imported)]


def _wrong(call, imported):
    if call.func.id not in imported:
        return []
    parameters = inspect.signature(imported[call.func.id]).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return []  # typed options, which are refused when a recipe is made
    return [
        f"{call.func.id}({item.arg}=)"
        for item in call.keywords
        if item.arg and item.arg not in parameters
    ]
