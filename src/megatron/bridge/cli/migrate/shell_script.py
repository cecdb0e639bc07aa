# SPDX-License-Identifier: Apache-2.0
"""The command line that a shell script of Megatron-LM runs, read without running anything.

Assignments of texts, numbers and arrays are followed, as in ``MODEL_ARGS=(--num-layers 32)``. What is assigned in a
branch or a loop, or by another command, is unknown: a command line that needs it is refused, with the way to let the
shell compute it.
"""

import ast
import operator
import os
import re
import shlex
from collections.abc import Callable, Iterator, Sequence

from megatron.bridge.utils.errors import UserError, one_line

_ASSIGNMENT = re.compile(r"(?:export\s+|declare\s+|local\s+)?([A-Za-z_]\w*)(\+?=)(.*)", re.DOTALL)
_OPENS = re.compile(r"(?:if|for|while|until|case|select)\b|.*\{\s*$")
_CLOSES = re.compile(r"(?:fi|done|esac)\b|\}\s*$")
_REFERENCE = re.compile(
    r"\$\(\((?P<arithmetic>[^()]*)\)\)|\$\((?P<command>[^()]*)\)|`(?P<quoted>[^`]*)`"
    r"|\$\{(?P<name>\w+|[@*])(?:\[[@*]\])?(?::?-(?P<default>[^}]*))?\}|\$(?P<plain>\w+|[@*])"
)
_QUOTED_ARRAY = re.compile(r'"\$\{(\w+)\[[@*]\]\}"')
_OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}

RECORD = (
    'let the shell print it, which runs the rest of the script: bash -c \'torchrun() { printf "%s " torchrun "$@"; }; '
    "export -f torchrun; . ./{name}' > command.txt, and give command.txt"
)


class _UnknownError(Exception):
    """A value that only the shell can compute."""


class ShellScript:
    """The variables of a script as far as they are known, and its last Python command.

    Args:
        text: The script.
        name: How messages call it.
        arguments: Its own arguments, ``$1``, ``$2``, ...
    """

    def __init__(self, text: str, name: str, arguments: Sequence[str] = ()) -> None:
        self._name = name
        self._values = {str(index): value for index, value in enumerate(arguments, 1)}
        self._values |= dict.fromkeys("@*", " ".join(arguments))
        self._arrays: set[str] = set()  # variables whose value is words, quoted as in a command
        self._unknown: dict[str, str] = {}  # variable -> why it is not known
        self._command: str | None = None
        self._read(text)

    def command(self) -> str:
        """Return the command line, with its variables replaced by their values.

        Raises:
            UserError: there is none, or it needs what only the shell can compute.
        """
        if self._command is None:
            raise UserError(
                f"{self._name} has no command with a Python script outside of branches: "
                + RECORD.replace("{name}", self._name)
            )
        try:
            return self._expand(self._command)
        except _UnknownError as error:
            raise UserError(
                f"{self._name}: {error}: " + RECORD.replace("{name}", self._name)
            ) from error

    def _read(self, text: str) -> None:
        depth = 0
        for line in _statements(text):
            if _CLOSES.match(line):
                depth = max(0, depth - 1)
                continue
            if _OPENS.match(line) and not _ASSIGNMENT.fullmatch(line):
                depth += 0 if re.search(r"(?:\bfi|\bdone|\besac|\})\s*$", line) else 1
                for name in re.findall(r"\b([A-Za-z_]\w*)\+?=", line):
                    self._unknown[name] = f"${name} is assigned in a branch or a loop"
                continue
            assignment = _ASSIGNMENT.fullmatch(line)
            if assignment:
                self._assign(assignment[1], assignment[2], assignment[3].strip(), depth)
            elif depth == 0 and self._runs_python(line):
                self._command = line

    def _assign(self, name: str, sign: str, value: str, depth: int) -> None:
        if depth:
            self._unknown[name] = f"${name} is assigned in a branch or a loop"
            return
        is_array = value.startswith("(") and value.endswith(")")
        try:
            expanded = self._expand(value[1:-1] if is_array else value)
        except _UnknownError as error:
            self._unknown[name] = str(error)
            return
        words = shlex.split(expanded, comments=True)
        expanded = shlex.join(words) if is_array else " ".join(words)
        if is_array:
            self._arrays.add(name)
        before = self._values.get(name, "") if sign == "+=" else ""
        self._values[name] = f"{before} {expanded}" if is_array and before else before + expanded
        if sign == "=":
            self._unknown.pop(name, None)

    def _runs_python(self, line: str) -> bool:
        known = _REFERENCE.sub(self._known_value_of, line)
        try:
            return any(word.endswith(".py") for word in shlex.split(known, comments=True))
        except ValueError:
            return False

    def _known_value_of(self, match: re.Match[str]) -> str:
        try:
            return self._value_of(match)
        except _UnknownError:
            return ""

    def _expand(self, text: str) -> str:
        # an array in quotes gives its words as they are, and one without quotes is split again
        words = _QUOTED_ARRAY.sub(lambda match: self._value_of_name(match[1]), text)
        return _REFERENCE.sub(self._value_of, words)

    def _value_of(self, match: re.Match[str]) -> str:
        if match["arithmetic"] is not None:
            return str(_calculate(self._expand(match["arithmetic"]), self._value_of_name))
        if match["command"] is not None or match["quoted"] is not None:
            raise _UnknownError(f"{match[0]} is the output of a command")
        name = match["name"] or match["plain"]
        if name in self._unknown:
            raise _UnknownError(self._unknown[name])
        value = self._values.get(name, os.environ.get(name))
        if not value and match["default"] is not None:
            return self._expand(match["default"].strip("\"'"))
        value = self._value_of_name(name)
        return " ".join(shlex.split(value)) if name in self._arrays else value

    def _value_of_name(self, name: str) -> str:
        if name in self._unknown:
            raise _UnknownError(self._unknown[name])
        value = self._values.get(name, os.environ.get(name))
        if value is not None:
            return value
        if name.isdecimal():
            raise _UnknownError(
                f"${name} is an argument of the script: give its arguments after its name, in one word"
            )
        raise _UnknownError(f"${name} has no value: export it")


def _calculate(text: str, value_of: Callable[[str], str]) -> int:
    """Return the value of integer arithmetic, in which variables need no ``$``."""

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.Name) and value_of(node.id).isdecimal():
            return int(value_of(node.id))
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
            return _OPERATIONS[type(node.op)](value(node.left), value(node.right))
        raise _UnknownError(f"$(({text})) is no arithmetic of whole numbers")

    try:
        return value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ZeroDivisionError) as error:
        raise _UnknownError(f"$(({text})) cannot be computed ({one_line(error)})") from error


def _statements(text: str) -> Iterator[str]:
    """Yield the lines of a script, continued lines joined and arrays complete, without comments."""
    joined = re.sub(r"\\\r?\n", " ", text)
    array: list[str] = []
    for raw_line in joined.splitlines():
        line = _without_comment(raw_line).strip()
        if array:
            array.append(line)
            if line.endswith(")"):
                yield " ".join(array)
                array = []
        elif re.match(r"(?:export\s+)?\w+\+?=\((?!.*\)\s*$)", line):
            array = [line]
        elif line:
            yield from (part.strip() for part in re.split(r";(?:\s+|$)", line) if part.strip())


def _without_comment(line: str) -> str:
    """Remove a comment, which begins at a word and outside of quotes."""
    quote = ""
    for index, character in enumerate(line):
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character == "#" and (index == 0 or line[index - 1].isspace()):
            return line[:index]
    return line
