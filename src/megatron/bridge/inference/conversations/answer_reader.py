# SPDX-License-Identifier: Apache-2.0
"""Split an answer into reasoning, content and calls of tools while it is generated.

The parts of an answer do not depend on the pieces in which it arrives. Reasoning and content are passed on at once,
except for what may be the beginning of a mark; a call is passed on when it is complete. A text that looks like a call
but is none stays content.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megatron.bridge.inference.conversations.tool_parsers import (
    Call,
    ReasoningFormat,
    Schemas,
    ToolFormat,
    read_calls,
)


@dataclass(frozen=True)
class AnswerText:
    """Text of the answer or of the reasoning before it."""

    kind: Literal["content", "reasoning"]
    text: str


Part = AnswerText | Call


@dataclass(frozen=True)
class AnswerFormat:
    """How to read the answers to a request.

    Attributes:
        tool_format: format of calls; None leaves calls in the content.
        schemas: schemas of the tools.
        reasoning: marks of reasoning; None leaves reasoning in the content.
        begins_in_reasoning: whether the prompt has the mark before the reasoning.
        is_parallel: whether an answer may have several calls; of others only the first one counts.
    """

    tool_format: ToolFormat | None
    schemas: Schemas
    reasoning: ReasoningFormat | None = None
    begins_in_reasoning: bool = False
    is_parallel: bool = True

    @property
    def marks(self) -> tuple[str, ...]:
        tool_marks = self.tool_format.marks if self.tool_format is not None else ()
        return tool_marks + (self.reasoning.marks if self.reasoning is not None else ())

    def make_reader(self) -> "AnswerReader | HarmonyReader":
        """Return a reader for one answer."""
        if self.tool_format is not None and self.tool_format.name == "harmony":
            return HarmonyReader(self)
        return AnswerReader(self)


def _length_of_beginning(text: str, marks: Sequence[str]) -> int:
    """Return the number of characters at the end of ``text`` that may be the beginning of a mark."""
    longest = 0
    for mark in marks:
        for length in range(min(len(mark) - 1, len(text)), longest, -1):
            if mark.startswith(text[-length:]):
                longest = length
                break
    return longest


def _first_mark(text: str, marks: Sequence[str]) -> tuple[int, str] | None:
    """Return the position of the first mark in ``text`` and the mark."""
    positions = [(text.find(mark), mark) for mark in marks if mark in text]
    return min(positions) if positions else None


class _CallLimit:
    """Drops calls behind the first one if only one is allowed."""

    def __init__(self, is_parallel: bool) -> None:
        self._is_parallel = is_parallel
        self.count = 0

    def admit(self, calls: Sequence[Call]) -> list[Part]:
        admitted: list[Part] = []
        for call in calls:
            if self._is_parallel or self.count == 0:
                admitted.append(call)
            self.count += 1
        return admitted


class AnswerReader:
    """Reads an answer whose calls and reasoning are between marks."""

    def __init__(self, answer_format: AnswerFormat) -> None:
        self._format = answer_format
        self._held = ""  # text that has not been passed on
        self._state: Literal["start", "reasoning", "content", "call"] = "start"
        if answer_format.begins_in_reasoning:
            self._state = "reasoning"
        self._trims_start = True  # whitespace after the begin of reasoning is left out
        self._has_content = False
        self._body_from = 0  # where in the held text to look for the end of a call
        self._call_mark = ""  # the mark before the call in the held text
        self._calls = _CallLimit(answer_format.is_parallel)
        self._length = 0  # characters of the answer so far
        self._reasoning_start: int | None = 0 if answer_format.begins_in_reasoning else None
        self._reasoning_end: int | None = None

    def add(self, text: str, is_over: bool = False) -> list[Part]:
        """Add a piece of the answer and return the parts that are complete."""
        self._held += text
        self._length += len(text)
        parts: list[Part] = []
        steps = {
            "start": self._read_start,
            "reasoning": self._read_reasoning,
            "content": self._read_content,
            "call": self._read_call,
        }
        while steps[self._state](parts, is_over):
            pass
        return parts

    @property
    def reasoning_ranges(self) -> list[tuple[int, int]]:
        """Start and end of the reasoning between its marks, in characters of the answer."""
        if self._reasoning_start is None:
            return []
        end = self._length if self._reasoning_end is None else self._reasoning_end
        return [(self._reasoning_start, end)]

    @property
    def _position(self) -> int:
        """Return where in the answer the held text begins."""
        return self._length - len(self._held)

    def _read_start(self, parts: list[Part], is_over: bool) -> bool:
        reasoning = self._format.reasoning
        begin = self._held.lstrip()
        if reasoning is not None:
            if begin.startswith(reasoning.begin):
                self._held = begin[len(reasoning.begin) :]
                self._state = "reasoning"
                self._reasoning_start = self._position
                return True
            if reasoning.begin.startswith(begin) and not is_over:
                return False
        self._state = "content"
        self._trims_start = False
        return True

    def _read_reasoning(self, parts: list[Part], is_over: bool) -> bool:
        assert self._format.reasoning is not None
        end = self._format.reasoning.end
        before, mark, behind = self._held.partition(end)
        if mark:
            self._reasoning_end = self._position + len(before)
            self._add_text(parts, "reasoning", before.rstrip())
            self._held = behind
            self._state = "content"
            self._trims_start = True
            return True
        cut = len(self._held) if is_over else self._end_of_settled_text((end,))
        self._add_text(parts, "reasoning", self._held[:cut])
        self._held = self._held[cut:]
        return False

    def _end_of_settled_text(self, marks: Sequence[str]) -> int:
        """Return where the text ends that is passed on whatever follows: before whitespace and parts of marks."""
        settled = self._held[: len(self._held) - _length_of_beginning(self._held, marks)]
        return len(settled.rstrip())

    def _read_content(self, parts: list[Part], is_over: bool) -> bool:
        tool_format = self._format.tool_format
        if tool_format is None:
            self._add_text(parts, "content", self._held)
            self._held = ""
            return False
        if tool_format.openings and not self._has_content and not self._calls.count:
            begin = self._held.lstrip()
            if begin and begin[0] in tool_format.openings:
                self._begin_call(0, "")
                return True
        marks = [mark for mark in (tool_format.begin, *tool_format.wrappers) if mark]
        position_and_mark = _first_mark(self._held, marks)
        if position_and_mark is None:
            cut = len(self._held) if is_over else self._end_of_settled_text(marks)
            self._add_text(parts, "content", self._held[:cut])
            self._held = self._held[cut:]
            return False
        position, mark = position_and_mark
        self._add_text(parts, "content", self._held[:position].rstrip())
        self._begin_call(position, mark)
        if mark != tool_format.begin and not tool_format.openings:
            self._held = self._held[len(mark) :]
            self._state = "content"
        return True

    def _begin_call(self, position: int, mark: str) -> None:
        self._held = self._held[position:]
        self._call_mark = mark
        self._body_from = len(mark)
        self._state = "call"

    def _read_call(self, parts: list[Part], is_over: bool) -> bool:
        tool_format = self._format.tool_format
        assert tool_format is not None
        begin = len(self._call_mark)
        end = tool_format.end
        position = self._held.find(end, self._body_from) if end else -1
        if position < 0 and not is_over:
            if end:  # the mark may be cut
                self._body_from = max(begin, len(self._held) - len(end) + 1)
            return False
        body = self._held[begin:] if position < 0 else self._held[begin:position]
        for wrapper in tool_format.wrappers:
            body = body.replace(wrapper, "")
        calls = read_calls(tool_format, body, self._format.schemas)
        if calls is not None:
            parts += self._calls.admit(calls)
            self._held = "" if position < 0 else self._held[position + len(end or "") :]
            self._state = "content"
            return True
        if position >= 0 and _is_inside_text(body):
            assert end is not None
            self._body_from = position + len(end)
            return True
        behind = len(self._held) if position < 0 else position + len(end or "")
        self._add_text(parts, "content", self._held[:behind])
        self._held = self._held[behind:]
        self._state = "content"
        return True

    def _add_text(
        self, parts: list[Part], kind: Literal["content", "reasoning"], text: str
    ) -> None:
        if self._trims_start:
            text = text.lstrip()
        if kind == "content" and self._calls.count and not text.strip():
            return
        if not text:
            return
        self._trims_start = False
        self._has_content = self._has_content or (kind == "content" and bool(text.strip()))
        parts.append(AnswerText(kind, text))


def _is_inside_text(body: str) -> bool:
    """Return whether JSON ends inside a text, so that a mark behind it belongs to the text."""
    if not body.lstrip().startswith(("{", "[")):
        return False
    return re.sub(r"\\.", "", body, flags=re.DOTALL).count('"') % 2 == 1


_HARMONY_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
_MESSAGE = "<|message|>"
_RECIPIENT = re.compile(r"to=functions\.([\w.-]+)")


class HarmonyReader:
    """Reads messages of gpt-oss: reasoning in the channel ``analysis``, calls as messages to ``functions``."""

    def __init__(self, answer_format: AnswerFormat) -> None:
        self._format = answer_format
        self._held = ""
        self._header: str | None = None  # of the message whose text is being read
        self._calls = _CallLimit(answer_format.is_parallel)
        self._length = 0  # characters of the answer so far
        self.reasoning_ranges: list[tuple[int, int]] = []
        """Start and end of each part of the reasoning, in characters of the answer."""

    def add(self, text: str, is_over: bool = False) -> list[Part]:
        """Add a piece of the answer and return the parts that are complete."""
        self._held += text
        self._length += len(text)
        parts: list[Part] = []
        goes_on = True
        while goes_on:
            read_part = self._read_text if self._header is not None else self._read_header
            goes_on = read_part(parts, is_over)
        return parts

    def _read_header(self, parts: list[Part], is_over: bool) -> bool:
        header, mark, behind = self._held.partition(_MESSAGE)
        if mark:
            self._header = header
            self._held = behind
            return True
        if is_over:
            text = self._held
            for end in (*_HARMONY_ENDS, "<|constrain|>"):
                text = text.replace(end, "")
            text = text.removeprefix("assistant")
            if text.strip():
                parts.append(AnswerText("content", text))
            self._held = ""
        return False

    def _read_text(self, parts: list[Part], is_over: bool) -> bool:
        assert self._header is not None
        position_and_mark = _first_mark(self._held, _HARMONY_ENDS)
        recipient = _RECIPIENT.search(self._header)
        if position_and_mark is not None:
            position, mark = position_and_mark
            behind = position + len(mark)
        elif is_over:
            position = behind = len(self._held)
        elif recipient is not None:
            return False
        else:
            position = len(self._held) - _length_of_beginning(self._held, _HARMONY_ENDS)
            self._add_text(parts, self._held[:position])
            self._held = self._held[position:]
            return False
        text = self._held[:position]
        calls = self._read_call(recipient[1], text) if recipient is not None else None
        if calls is None:
            self._add_text(parts, text)
        else:
            parts += self._calls.admit(calls)
        self._header = None
        self._held = self._held[behind:]
        return bool(self._held)

    def _read_call(self, name: str, arguments: str) -> list[Call] | None:
        if not self._format.schemas:
            return None
        tool_format = self._format.tool_format
        assert tool_format is not None
        call_text = f'{{"name": "{name}", "arguments": {arguments.strip() or "{}"}}}'
        return read_calls(tool_format, call_text, self._format.schemas)

    def _add_text(self, parts: list[Part], text: str) -> None:
        assert self._header is not None
        if not text:
            return
        is_reasoning = "analysis" in self._header and _RECIPIENT.search(self._header) is None
        if is_reasoning:  # the held text begins with ``text``
            start = self._length - len(self._held)
            self.reasoning_ranges.append((start, start + len(text)))
        parts.append(AnswerText("reasoning" if is_reasoning else "content", text))
