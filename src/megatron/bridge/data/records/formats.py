# SPDX-License-Identifier: Apache-2.0
"""The known record formats: one record becomes a conversation, a pair of texts, or a text.

The formats are ``messages`` (OpenAI), ``conversations`` (ShareGPT), ``prompt`` and ``completion`` (texts or lists
of messages), ``input`` and ``output``, and ``text``. Conversations may have images and videos (``media_parts``).
Other keys are metadata. A record of two formats, or of none, is refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron.bridge.data.records.media_parts import (
    MEDIA_KEYS,
    PlacedMedium,
    content_part,
    place_media,
)
from megatron.bridge.utils import strict_json
from megatron.bridge.utils.errors import UserError, did_you_mean

Message = dict[str, Any]
Record = Mapping[str, Any]
ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT_ROLES = {
    "system": "system",
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bot", "model", "assistant", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
}
JSON_TYPES: dict[str, type] = {"a string": str, "a list": list, "an object": Mapping}
# an assistant message with one of these needs no content
INSTEAD_OF_CONTENT = ("tool_calls", "reasoning_content", "reasoning", "thinking")
FORMATS: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "conversations": ("conversations",),
    "prompt and completion": ("prompt", "completion"),
    "input and output": ("input", "output"),
    "text": ("text",),
}


@dataclass(frozen=True)
class Chat:
    messages: list[
        Message
    ]  # as chat templates expect them: ``role``, ``content``, and any other keys of the record
    tools: list[dict[str, Any]] | None = (
        None  # descriptions of the tools that the assistant may call
    )
    excluded: frozenset[int] = (
        frozenset()
    )  # assistant messages that are left out of the loss (``weight`` 0)
    completion: int | None = (
        None  # index of its first message; None: the first after the last user message
    )
    template_options: dict[str, Any] = field(default_factory=dict)  # such as ``enable_thinking``
    images: tuple[
        PlacedMedium, ...
    ] = ()  # in the order of rendering; with them, all content is a list of parts

    @property
    def answers(self) -> list[int]:
        return [
            index for index, message in enumerate(self.messages) if message["role"] == "assistant"
        ]

    @property
    def completion_start(self) -> int:
        """Return the index of the first message of the completion."""
        if self.completion is not None:
            return self.completion
        users = [index for index, message in enumerate(self.messages) if message["role"] == "user"]
        return users[-1] + 1 if users else 0


@dataclass(frozen=True)
class PromptCompletion:
    """A prompt and its completion, both plain text."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Text:
    """A text, all of it in the loss."""

    text: str


ParsedRecord = Chat | PromptCompletion | Text
CHAT_KEYS = ("tools", "chat_template_kwargs", "image", "images", "video", "videos")
USED_WITH: dict[str, tuple[str, ...]] = {
    "messages": CHAT_KEYS,
    "conversations": (*CHAT_KEYS, "system"),
}
"""Further keys that each format reads."""


def unused_keys(record: Record, parsed: ParsedRecord) -> list[str]:
    """Return the sorted keys of ``record`` that ``parsed`` does not use."""
    present = {key for key, value in record.items() if value is not None}
    used = {key for keys in FORMATS.values() if present.issuperset(keys) for key in keys}
    if isinstance(parsed, Chat):
        used.update(USED_WITH["conversations" if "conversations" in used else "messages"])
    return sorted(present - used)


def parse(record: Record, location: str) -> ParsedRecord:
    """Parse ``record``; ``location`` (file and line number) begins the message of an error."""
    name = _format_of(record, location)
    if name == "messages":
        return _parse_messages(record, record["messages"], location)
    if name == "conversations":
        return _parse_sharegpt(record, location)
    if not isinstance(record[FORMATS[name][0]], list):
        _refuse_images(record, name, location)
    if name == "text":
        return Text(expect(record["text"], "a string", location, "text"))
    prompt, completion = FORMATS[name]
    if isinstance(record[prompt], list):
        return _conversational_pair(record, location)
    return PromptCompletion(
        *(expect(record[key], "a string", location, key) for key in (prompt, completion))
    )


def _refuse_images(record: Record, name: str, location: str) -> None:
    """Refuse images in plain text; under a media key, a list, a mapping or bytes count as images."""
    if media_key := next(
        (key for key in MEDIA_KEYS if isinstance(record.get(key), list | Mapping | bytes)), None
    ):
        raise UserError(
            f"{location}: {name} with {media_key} cannot have images: write messages with image parts"
        )


def _format_of(record: Record, location: str) -> str:
    present = {key for key, value in record.items() if value is not None}
    matching_formats = [name for name, keys in FORMATS.items() if present.issuperset(keys)]
    if "instruction" in present:
        raise UserError(
            f"{location}: the key instruction has no common meaning across datasets: for Alpaca's format set "
            f"dataset.process_example_fn=alpaca_example, for others write a process_example_fn"
        )
    if len(matching_formats) == 1:
        return matching_formats[0]
    if matching_formats:
        raise UserError(
            f"{location}: the record has both {' and '.join(matching_formats)}: keep one, with a process_example_fn"
        )
    raise UserError(
        f"{location}: expected messages, conversations, prompt and completion, input and output, or text; the keys "
        f"are: {_key_list(record)}"
    )


def _key_list(mapping: Mapping[str, Any]) -> str:
    return ", ".join(sorted(mapping)) or "none"


def expect(value: Any, kind: str, location: str, name: str) -> Any:
    """Check that ``value`` has the JSON type ``kind``: ``a string``, ``a list`` or ``an object``."""
    if not isinstance(value, JSON_TYPES[kind]):
        raise UserError(f"{location}: {name} must be {kind}, not {type(value).__name__}")
    return value


def _parse_messages(
    record: Record, messages: Any, location: str, completion: int | None = None
) -> Chat:
    if not isinstance(messages, list) or not messages:
        raise UserError(f"{location}: messages must be a list with at least one message")
    cleaned = [
        _parse_message(message, f"{location}: message {message_number}")
        for message_number, message in enumerate(messages, start=1)
    ]
    excluded = frozenset(
        index for index, message in enumerate(cleaned) if message.pop("weight", 1) == 0
    )
    options = record.get("chat_template_kwargs") or {}
    expect(options, "an object", location, "chat_template_kwargs")
    images = tuple(place_media(record, cleaned, location))
    return Chat(
        cleaned,
        _parse_tools(record.get("tools"), location),
        excluded,
        completion,
        dict(options),
        images,
    )


def _conversational_pair(record: Record, location: str) -> Chat:
    prompt = record["prompt"]
    completion = expect(record["completion"], "a list", location, "completion, like prompt,")
    return _parse_messages(record, [*prompt, *completion], location, completion=len(prompt))


def _parse_message(message: Any, location: str) -> Message:
    """Return the message without null values, with its content as a string and its tool calls parsed."""
    expect(message, "an object", location, "a message with role and content")
    # Tables fill missing keys with nulls, which a template would render differently from missing keys.
    cleaned: Message = {key: value for key, value in message.items() if value is not None}
    role = cleaned.get("role")
    if role not in ROLES:
        hint = did_you_mean(str(role), ROLES)
        raise UserError(
            f"{location}: role={role!r} is unknown: use one of {', '.join(ROLES)}{hint}"
        )
    if cleaned.get("weight", 1) not in (0, 1):
        raise UserError(
            f"{location}: weight={cleaned['weight']} must be 0 (left out of the loss) or 1"
        )
    if "content" not in cleaned and not (
        role == "assistant" and any(map(cleaned.get, INSTEAD_OF_CONTENT))
    ):
        problem = "is null" if "content" in message else "is missing"
        raise UserError(
            f'{location}: the key content {problem} (keys: {_key_list(cleaned)}): write "" for no content'
        )
    cleaned["content"] = _parse_content(cleaned.get("content", ""), location)
    if "tool_calls" in cleaned:
        calls = expect(cleaned["tool_calls"], "a list", location, "tool_calls")
        cleaned["tool_calls"] = [_tool_call(call, location) for call in calls]
    return cleaned


def _parse_content(content: Any, location: str) -> Any:
    """Return the content as a string of the joined text parts, or as a list of parts if it has images or videos."""
    if not isinstance(content, list):
        return expect(content, "a string", location, "content")
    parts = [content_part(part, location) for part in content]
    if any(part["type"] != "text" for part in parts):
        return parts
    return "".join(part["text"] for part in parts)


def _tool_call(call: Any, location: str) -> dict[str, Any]:
    """Parse the arguments of a tool call: a JSON string in OpenAI's format, an object for templates."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UserError(f"{location}: a tool call must have a function with a name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _parse_json(
            arguments or "{}", f"{location}: the arguments of {function['name']}"
        )
    if arguments is not None:
        expect(arguments, "an object", location, f"the arguments of {function['name']}")
    rest = {
        key: value for key, value in call.items() if key not in ("function", "name", "arguments")
    }
    return {
        "type": "function",
        **rest,
        "function": {"name": function["name"], "arguments": arguments or {}},
    }


def _parse_tools(tools: Any, location: str) -> list[dict[str, Any]] | None:
    if isinstance(tools, str):
        tools = _parse_json(tools, f"{location}: tools") if tools.strip() else None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise UserError(f"{location}: tools must be a list of objects")
    return [dict(tool) for tool in tools]


def _parse_json(text: str, location: str) -> Any:
    try:
        return strict_json.loads(text)
    except ValueError as error:
        raise UserError(f"{location} are not valid JSON: {error}") from error


def _parse_sharegpt(record: Record, location: str) -> Chat:
    turns = expect(record["conversations"], "a list", location, "conversations")
    messages = [
        _parse_turn(turn, f"{location}: message {message_number}")
        for message_number, turn in enumerate(turns, start=1)
    ]
    if record.get("system"):
        if any(
            isinstance(message, Mapping) and message.get("role") == "system" for message in messages
        ):
            raise UserError(
                f"{location}: the record has both the key system and a system message: keep one"
            )
        messages.insert(0, {"role": "system", "content": record["system"]})
    return _parse_messages(record, messages, location)


def _parse_turn(turn: Any, location: str) -> Any:
    """Convert a turn with ``from`` and ``value`` to a message; a turn with ``role`` and ``content`` is one already."""
    if not isinstance(turn, Mapping) or "from" not in turn:
        return turn
    role = turn["from"]
    if not isinstance(role, str) or role not in SHAREGPT_ROLES:
        hint = did_you_mean(str(role), SHAREGPT_ROLES)
        raise UserError(
            f"{location}: from={role!r} is unknown: use one of {', '.join(SHAREGPT_ROLES)}{hint}"
        )
    rest = {key: value for key, value in turn.items() if key not in ("from", "value")}
    if "value" not in turn and not any(rest.get(key) for key in INSTEAD_OF_CONTENT):
        raise UserError(
            f'{location}: the key value is missing (keys: {_key_list(turn)}): write "" for no content'
        )
    if role == "function_call":
        calls = _parse_json(
            _parse_content(turn.get("value"), location), f"{location}: the function call"
        )
        calls = calls if isinstance(calls, list) else [calls]
        return {"role": "assistant", "content": "", "tool_calls": calls, **rest}
    return {"role": SHAREGPT_ROLES[role], "content": turn.get("value"), **rest}
