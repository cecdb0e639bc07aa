# SPDX-License-Identifier: Apache-2.0
"""Messages of answers in OpenAI's form: complete, or as the deltas of a stream."""

import hashlib
import secrets
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from megatron.bridge.inference.conversations.answer_reader import AnswerFormat
from megatron.bridge.inference.conversations.tool_parsers import Call

Json = dict[str, Any]


class MessageWriter:
    """Writes the message of one answer.

    Args:
        answer_format: How to read the answer; None if all of it is content.
        id_seed: Decides the ids of calls that the model does not name; None makes random ones.
    """

    def __init__(self, answer_format: AnswerFormat | None, id_seed: str | None = None) -> None:
        self._id_seed = id_seed
        tool_format = None if answer_format is None else answer_format.tool_format
        self._has_short_ids = tool_format is not None and tool_format.id_pattern == "short"
        self._reader = None if answer_format is None else answer_format.make_reader()
        self.call_count = 0

    def add(self, text: str, is_over: bool) -> Json:
        """Add a piece of the answer and return the parts that it completes, as the fields of a delta."""
        if self._reader is None:
            return {"content": text} if text else {}
        delta: Json = {}
        for part in self._reader.add(text, is_over):
            if isinstance(part, Call):
                delta.setdefault("tool_calls", []).append(self._write_call(part))
            else:
                name = "content" if part.kind == "content" else "reasoning_content"
                delta[name] = delta.get(name, "") + part.text
        return delta

    def write_message(self, text: str) -> Json:
        """Return the message of a complete answer."""
        delta = self.add(text, is_over=True)
        content = delta.get("content", None if "tool_calls" in delta else "")
        message: Json = {"role": "assistant", "content": content}
        if "reasoning_content" in delta:
            message["reasoning_content"] = delta["reasoning_content"]
        if "tool_calls" in delta:
            message["tool_calls"] = delta["tool_calls"]
            for call in message["tool_calls"]:
                del call["index"]  # only streams have it
        return message

    def count_reasoning_tokens(self, text_offsets: Sequence[int]) -> int:
        """Return how many tokens are reasoning, without its marks.

        Args:
            text_offsets: Where in the text of the answer each token begins, in ascending order.
        """
        ranges = [] if self._reader is None else self._reader.reasoning_ranges
        return sum(
            bisect_left(text_offsets, end) - bisect_left(text_offsets, start)
            for start, end in ranges
        )

    def _write_call(self, call: Call) -> Json:
        index = self.call_count
        self.call_count += 1
        function = {"name": call.name, "arguments": call.arguments}
        call_id = call.id or self._make_id(index)
        return {"index": index, "id": call_id, "type": "function", "function": function}

    def _make_id(self, index: int) -> str:
        if self._id_seed is None:
            digits = secrets.token_hex(12)
        else:
            digits = hashlib.sha256(f"{self._id_seed} {index}".encode()).hexdigest()[:24]
        return digits[:9] if self._has_short_ids else f"call_{digits}"
