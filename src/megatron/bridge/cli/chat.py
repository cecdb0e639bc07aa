# SPDX-License-Identifier: Apache-2.0
"""``megatron-bridge chat``: a conversation in the terminal."""

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron.bridge.cli.support import model_options
from megatron.bridge.cli.support.options import (
    add_model_options,
    add_sampling_options,
    add_tool_parser,
)
from megatron.bridge.cli.support.parser import Parser
from megatron.bridge.utils.atomic import read_text
from megatron.bridge.utils.errors import UserError

DESCRIPTION = "Chat with a model in its own template. Answers are streamed; Ctrl-C stops an answer."
EXAMPLES = """example:
  megatron-bridge chat HuggingFaceTB/SmolLM2-135M-Instruct --system "Answer briefly."

/image FILE and /audio FILE add an image or a recording to the next question, /reset starts
again, /undo takes back the last question, /seed N sets the seed, /save FILE writes the messages
as JSON, /quit or Ctrl-D ends. With --tools, type the result of each call that the model makes.
"""


def add_arguments(parser: Parser) -> None:
    parser.description = DESCRIPTION
    parser.epilog = EXAMPLES
    add_model_options(parser, max_requests=1)
    parser.add_argument("--system", metavar="TEXT", help="system message at the start of the chat")
    parser.add_argument(
        "--tools",
        type=Path,
        metavar="FILE",
        help="JSON list of functions, as in OpenAI's API, that the model may call",
    )
    add_tool_parser(parser)
    add_sampling_options(
        parser, max_new_tokens=512, temperature=0.7, temperature_help="0 is greedy (0.7)"
    )


def run(args: argparse.Namespace) -> int:
    from megatron.bridge.inference.requests import Sampling

    if "RANK" in os.environ:
        raise UserError(
            "chat reads from a terminal: start it without torchrun; --tp and --pp start the processes"
        )
    sampling = Sampling(**model_options.sampling_values(args))
    tools = None if args.tools is None else _read_tools(args.tools)
    model_options.check_paths(args)
    with model_options.load(args) as llm:
        Conversation(llm, sampling, args.system, tools).run(_ask, sys.stdout.write)
    return 0


def _read_tools(path: Path) -> list[dict[str, Any]]:
    from megatron.bridge.inference.conversations.options import read_options

    text = read_text(path, f"--tools {path}")
    try:
        tools = json.loads(text)
        read_options({"tools": tools})
    except ValueError as error:  # or a UserError
        raise UserError(f"--tools {path}: {error}") from error
    return tools


def _ask() -> str | None:
    """The next line of the user; None at the end."""
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return None


@dataclass
class Conversation:
    """The messages of a chat, which start with the ``system`` message, and the commands that change them."""

    llm: Any
    sampling: Any
    system: str | None
    tools: list[dict[str, Any]] | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    images: list[str] = field(default_factory=list)  # images of the next question
    recordings: list[str] = field(default_factory=list)  # recordings of the next question

    def __post_init__(self) -> None:
        self.reset()

    def run(self, ask: Callable[[], str | None], write: Callable[[str], object]) -> None:
        while (line := ask()) is not None and line.strip() != "/quit":
            before = list(self.messages)
            try:
                if line.startswith("/"):
                    self._command(line.strip(), write)
                else:
                    self._answer(line, ask, write)
            except UserError as error:
                self.messages = before
                write(f"error: {error}\n")

    def reset(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system else []
        self.images = []
        self.recordings = []

    def _answer(
        self, question: str, ask: Callable[[], str | None], write: Callable[[str], object]
    ) -> None:
        from megatron.bridge.inference.prompts import as_messages

        if not question.strip():
            return
        self.messages = [*self.messages, *as_messages(question, self.images, self.recordings)]
        self.images = []  # a damaged image is not sent again
        self.recordings = []
        message = self._generate(write)
        while message.get("tool_calls"):
            for call in message["tool_calls"]:
                function = call["function"]
                write(f"call {function['name']}({function['arguments']})\nresult: ")
                result = ask()
                if result is None:
                    return
                tool_message = {"role": "tool", "tool_call_id": call["id"], "content": result}
                self.messages.append(tool_message)
            message = self._generate(write)

    def _generate(self, write: Callable[[str], object]) -> dict[str, Any]:
        """Add the answer to the messages and return it."""
        record: dict[str, Any] = {"messages": self.messages}
        if self.tools is not None:
            record["tools"] = self.tools
        message: dict[str, Any] = {}
        with _interrupts() as stopped:
            for piece in self.llm.stream(record, self.sampling, stopped):
                if isinstance(piece, str):
                    write(piece)
                    sys.stdout.flush()
                else:
                    message = piece.message
        write("\n")
        self.messages.append(message)
        return message

    def _command(self, line: str, write: Callable[[str], object]) -> None:
        name, _, value = line.partition(" ")
        if name == "/reset":
            self.reset()
        elif name == "/image":
            self.images.append(_existing(name, value.strip()))
        elif name == "/audio":
            self.recordings.append(_existing(name, value.strip()))
        elif name == "/undo":
            users = [
                index for index, message in enumerate(self.messages) if message["role"] == "user"
            ]
            self.messages = self.messages[: users[-1]] if users else self.messages
        elif name == "/seed":
            if not value.strip().isdecimal():
                raise UserError(f"/seed {value}: give a number")
            self.sampling = replace(self.sampling, seed=int(value))
        elif name == "/save":
            self._save(value.strip())
        else:
            write("commands: /image FILE, /audio FILE, /reset, /undo, /seed N, /save FILE, /quit\n")

    def _save(self, name: str) -> None:
        try:
            record: dict[str, Any] = {"messages": self.messages}
            if self.tools is not None:
                record["tools"] = self.tools
            Path(name).write_text(json.dumps(record, ensure_ascii=False) + "\n")
        except OSError as error:
            raise UserError(f"/save {name}: {error.strerror}") from error


def _existing(command: str, name: str) -> str:
    if not Path(name).is_file():
        raise UserError(f"{command} {name}: there is no such file")
    return name


@contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Inside the context, Ctrl-C makes the function return true instead of ending the program."""
    pressed: list[int] = []
    old = signal.signal(signal.SIGINT, lambda signal_number, _: pressed.append(signal_number))
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, old)
