# SPDX-License-Identifier: Apache-2.0
"""One record of a data set, in whichever of the known forms, as a chat, a pair of texts, or a text.

Known forms: ``messages`` (OpenAI), ``conversations`` (ShareGPT), ``prompt`` and ``completion`` (texts or lists of
messages), ``input`` and ``output``, ``text``. Other keys are metadata; a record of two forms, or of none, is
refused.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron.bridge.utils.errors import UserError, did_you_mean

Message = dict[str, Any]
ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
# what an assistant may say without words
BESIDE_CONTENT = ("tool_calls", "reasoning_content", "reasoning", "thinking")
FORMS: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "conversations": ("conversations",),
    "prompt and completion": ("prompt", "completion"),
    "input and output": ("input", "output"),
    "text": ("text",),
}


@dataclass(frozen=True)
class Chat:
    """A conversation.

    Attributes:
        messages: in the form that chat templates read: ``role``, ``content`` and whatever else was there.
        tools: descriptions of the tools that the assistant may call, if any.
        excluded: positions of assistant messages that are not to be learnt (``weight`` 0).
        completion: position of the first message of the completion; None: the first behind the last user message.
        template_options: what this record wants its template to know, such as ``enable_thinking``.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    excluded: frozenset[int] = frozenset()
    completion: int | None = None
    template_options: dict[str, Any] = field(default_factory=dict)

    @property
    def answers(self) -> list[int]:
        """Positions of the assistant's messages."""
        return [place for place, message in enumerate(self.messages) if message["role"] == "assistant"]

    @property
    def completion_start(self) -> int:
        """Position of the first message of the completion."""
        if self.completion is not None:
            return self.completion
        users = [place for place, message in enumerate(self.messages) if message["role"] == "user"]
        return users[-1] + 1 if users else 0


@dataclass(frozen=True)
class Pair:
    """A prompt and what follows it, both plain text."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Text:
    """Text to be learnt as a whole."""

    text: str


Record = Mapping[str, Any]
Sample = Chat | Pair | Text


def parse(record: Record, where: str) -> Sample:
    """The sample that ``record`` holds.

    Args:
        record: keys and values, as read from a file.
        where: file and line, for messages.

    Raises:
        UserError: the record has no known form, two of them, or a value of the wrong kind.
    """
    form = _form(record, where)
    if form == "messages":
        return _chat(record, record["messages"], where)
    if form == "conversations":
        return _sharegpt(record, where)
    if form == "text":
        return Text(_text(record, "text", where))
    prompt, completion = FORMS[form]
    if isinstance(record[prompt], list):
        return _conversational_pair(record, where)
    return Pair(_text(record, prompt, where), _text(record, completion, where))


def _form(record: Record, where: str) -> str:
    present = {key for key, value in record.items() if value is not None}
    found = [form for form, keys in FORMS.items() if present.issuperset(keys)]
    if "instruction" in present:
        raise UserError(
            f"{where}: the key instruction is a form of its own in every data set: join instruction and input to "
            f"a prompt with a process_example_fn"
        )
    if len(found) == 1:
        return found[0]
    if found:
        raise UserError(f"{where}: the record has {' and also '.join(found)}: keep one, with a process_example_fn")
    keys = ", ".join(sorted(record)) or "none"
    raise UserError(
        f"{where}: expected messages, conversations, prompt and completion, input and output, or text; the keys "
        f"are: {keys}"
    )


def _text(record: Record, key: str, where: str) -> str:
    value = record[key]
    if not isinstance(value, str):
        raise UserError(f"{where}: {key} must be a text, not {type(value).__name__}")
    return value


def _chat(record: Record, messages: Any, where: str, completion: int | None = None) -> Chat:
    if not isinstance(messages, list) or not messages:
        raise UserError(f"{where}: messages must be a list with at least one message")
    cleaned = [_message(message, f"{where}: message {number}") for number, message in enumerate(messages, start=1)]
    excluded = frozenset(place for place, message in enumerate(cleaned) if message.pop("weight", 1) == 0)
    options = record.get("chat_template_kwargs") or {}
    if not isinstance(options, Mapping):
        raise UserError(f"{where}: chat_template_kwargs must be an object, not {type(options).__name__}")
    return Chat(cleaned, _tools(record.get("tools"), where), excluded, completion, dict(options))


def _conversational_pair(record: Record, where: str) -> Chat:
    prompt, completion = record["prompt"], record["completion"]
    if not isinstance(completion, list):
        raise UserError(f"{where}: prompt is a list of messages, so completion must be one too")
    return _chat(record, [*prompt, *completion], where, completion=len(prompt))


def _message(message: Any, where: str) -> Message:
    """A message without empty keys, its content a text and its tool calls parsed."""
    if not isinstance(message, Mapping):
        raise UserError(f"{where}: it must be an object with role and content, not {type(message).__name__}")
    # Tables fill up missing keys with nulls; for a template, missing and null would be two things.
    cleaned: Message = {key: value for key, value in message.items() if value is not None}
    role = cleaned.get("role")
    if role not in ROLES:
        raise UserError(f"{where}: role={role!r} is none of {', '.join(ROLES)}{did_you_mean(str(role), ROLES)}")
    if cleaned.get("weight", 1) not in (0, 1):
        raise UserError(f"{where}: weight={cleaned['weight']} must be 0 (not learnt) or 1")
    if "content" not in message and not any(cleaned.get(key) for key in BESIDE_CONTENT):
        keys = ", ".join(sorted(cleaned))
        raise UserError(f'{where}: it has no content; its keys are: {keys} (empty is "")')
    cleaned["content"] = _content(cleaned.get("content", ""), where)
    if "tool_calls" in cleaned:
        cleaned["tool_calls"] = _tool_calls(cleaned["tool_calls"], where)
    return cleaned


def _content(content: Any, where: str) -> str:
    """A list of text parts is their text; other parts are refused."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise UserError(f"{where}: content must be a text, not {type(content).__name__}")
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise UserError(f"{where}: a content part of type {kind} is no text: use a vision-language data set")
        texts.append(text)
    return "".join(texts)


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """OpenAI sends arguments as JSON text; templates want the object."""
    if not isinstance(calls, list):
        raise UserError(f"{where}: tool_calls must be a list, not {type(calls).__name__}")
    return [_tool_call(call, where) for call in calls]


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UserError(f"{where}: a tool call needs a function with a name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _json(arguments or "{}", f"{where}: the arguments of {function['name']}")
    if not isinstance(arguments, Mapping | None):
        kind = type(arguments).__name__
        raise UserError(f"{where}: the arguments of {function['name']} must be an object, not {kind}")
    rest = {key: value for key, value in call.items() if key not in ("function", "name", "arguments")}
    return {"type": "function", **rest, "function": {"name": function["name"], "arguments": arguments or {}}}


def _tools(tools: Any, where: str) -> list[dict[str, Any]] | None:
    if isinstance(tools, str):
        tools = _json(tools, f"{where}: tools") if tools.strip() else None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise UserError(f"{where}: tools must be a list of objects")
    return [dict(tool) for tool in tools]


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{where} are not JSON: {error.msg} at column {error.colno}") from error


def _sharegpt(record: Record, where: str) -> Chat:
    turns = record["conversations"]
    if not isinstance(turns, list):
        raise UserError(f"{where}: conversations must be a list, not {type(turns).__name__}")
    messages = [_turn(turn, f"{where}: message {number}") for number, turn in enumerate(turns, start=1)]
    if record.get("system"):
        if any(isinstance(message, Mapping) and message.get("role") == "system" for message in messages):
            raise UserError(f"{where}: the record has a key system and also a system message: keep one")
        messages.insert(0, {"role": "system", "content": record["system"]})
    return _chat(record, messages, where)


def _turn(turn: Any, where: str) -> Any:
    """``from`` and ``value``; a turn with ``role`` and ``content`` is taken as it is."""
    if not isinstance(turn, Mapping) or "from" not in turn:
        return turn
    role = turn["from"]
    if not isinstance(role, str) or role not in SHAREGPT_ROLES:
        known = ", ".join(SHAREGPT_ROLES)
        raise UserError(f"{where}: from={role!r} is none of {known}{did_you_mean(str(role), SHAREGPT_ROLES)}")
    rest = {key: value for key, value in turn.items() if key not in ("from", "value")}
    if "value" not in turn and not any(rest.get(key) for key in BESIDE_CONTENT):
        keys = ", ".join(sorted(turn))
        raise UserError(f'{where}: it has no value; its keys are: {keys} (empty is "")')
    if role == "function_call":
        calls = _json(_content(turn.get("value"), where), f"{where}: the function call")
        calls = calls if isinstance(calls, list) else [calls]
        return {"role": "assistant", "content": "", "tool_calls": calls, **rest}
    return {"role": SHAREGPT_ROLES[role], "content": turn.get("value"), **rest}
