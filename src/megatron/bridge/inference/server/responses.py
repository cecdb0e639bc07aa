# SPDX-License-Identifier: Apache-2.0
"""OpenAI's ``/v1/responses``: its requests as requests of a chat, and answers of a chat as its responses.

Nothing is stored: a client sends the conversation with each request.
"""

import secrets
import time
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from megatron.bridge.inference.conversations.options import Strict, Text, ToolFunction
from megatron.bridge.inference.server.schemas import ChatRequest

type Json = dict[str, Any]

_IGNORED_INCLUDES = ("reasoning.encrypted_content",)  # reasoning is returned as text


class InputText(Strict):
    """Text of a message; ``output_text`` is that of an earlier answer."""

    type: Literal["input_text", "output_text"]
    text: Text
    # fields of answers
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class InputImage(Strict):
    type: Literal["input_image"]
    image_url: Text
    detail: Literal["auto", "low", "high"] | None = None


class InputMessage(Strict):
    """A message of the conversation, as clients write it or as an earlier answer has it."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Text | list[Annotated[InputText | InputImage, Discriminator("type")]]
    id: Text | None = None
    status: Text | None = None
    phase: Text | None = None


class FunctionCallItem(Strict):
    """A call of an earlier answer."""

    type: Literal["function_call"]
    call_id: Text
    name: Text
    arguments: Text
    id: Text | None = None
    status: Text | None = None


class FunctionOutputItem(Strict):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: Text
    output: Text | list[InputText]
    id: Text | None = None
    status: Text | None = None


class ReasoningText(Strict):
    type: Literal["reasoning_text", "summary_text"]
    text: Text


class ReasoningItem(Strict):
    """Reasoning of an earlier answer."""

    type: Literal["reasoning"]
    summary: list[ReasoningText] = Field(default_factory=list)
    content: list[ReasoningText] | None = None
    id: Text | None = None
    status: Text | None = None
    encrypted_content: None = None


def _type_of_item(item: Any) -> str:
    kind = item.get("type") if isinstance(item, Mapping) else getattr(item, "type", None)
    return str(kind or "message")


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_type_of_item),
]


class FunctionTool(ToolFunction):
    type: Literal["function"]


class ChosenFunction(Strict):
    type: Literal["function"]
    name: Text


class TextFormat(Strict):
    """The form of a structured answer."""

    type: Literal["text", "json_object", "json_schema"]
    name: Text | None = None
    description: Text | None = None
    content: Json | None = Field(None, alias="schema")
    strict: bool | None = None

    def as_chat(self) -> Json:
        """Return the ``response_format`` of a chat."""
        if self.type != "json_schema":
            return {"type": self.type}
        return {"type": "json_schema", "json_schema": {"name": self.name, "schema": self.content}}


class TextOptions(Strict):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(Strict):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto"] | None = None  # reasoning is returned as it is
    generate_summary: Literal["auto"] | None = None


class ResponsesRequest(Strict):
    """The body of ``/v1/responses``."""

    model: Text | None = None
    input: Text | list[InputItem]
    instructions: Text | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=1 << 31)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    stream: bool | None = None
    stream_options: Json | None = None
    tools: list[FunctionTool] | None = Field(None, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | ChosenFunction | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    truncation: Literal["disabled"] | None = None
    include: list[Text] | None = None
    # these change no token
    priority: int | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    user: Text | None = None
    service_tier: Text | None = None
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None
    prompt_cache_retention: Text | None = None
    # these ask for stored responses and prompts
    previous_response_id: Text | None = None
    conversation: Any = None
    prompt: Any = None
    background: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_tools(cls, body: Any) -> Any:
        tools: Any = body.get("tools") if isinstance(body, dict) else None
        for tool in tools if isinstance(tools, list) else ():
            kind = tool.get("type") if isinstance(tool, dict) else None
            if isinstance(kind, str) and kind != "function":
                raise ValueError(f"tools: {kind:.70} is not run by this server: give functions")
        return body

    @model_validator(mode="after")
    def _check(self) -> "ResponsesRequest":
        for name in ("previous_response_id", "conversation", "prompt", "background"):
            if getattr(self, name):
                raise ValueError(
                    f"{name}: responses are not stored here: send the conversation in input"
                )
        for name in self.include or ():
            if name not in _IGNORED_INCLUDES:
                raise ValueError(f"include: {name:.70} is not returned: leave it out")
        if not self.input:
            raise ValueError("input is empty: give a text or messages")
        return self

    def as_chat(self) -> ChatRequest:
        """Return the same request of ``/v1/chat/completions``.

        Raises:
            pydantic.ValidationError: The conversation or the tools are invalid.
        """
        chosen = self.tool_choice
        if isinstance(chosen, ChosenFunction):
            chosen = {"type": "function", "function": {"name": chosen.name}}
        options = {
            "model": self.model,
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "stream": self.stream,
            "priority": self.priority,
            "tools": [
                {
                    "type": "function",
                    "function": tool.model_dump(exclude_unset=True, exclude={"type"}),
                }
                for tool in self.tools or ()
            ],
            "tool_choice": chosen,
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": self.text.format.as_chat()
            if self.text is not None and self.text.format is not None
            else None,
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
        }
        return ChatRequest.model_validate({"messages": self._messages(), **options})

    def _messages(self) -> list[Json]:
        messages: list[Json] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        for item in self.input:
            _add_item(messages, item)
        return messages


def _add_item(messages: list[Json], item: Any) -> None:
    """Add an item of the input to a conversation, in which one message has the parts of an answer."""
    if isinstance(item, FunctionOutputItem):
        output = item.output
        text = output if isinstance(output, str) else "".join(part.text for part in output)
        messages.append({"role": "tool", "tool_call_id": item.call_id, "content": text})
        return
    if isinstance(item, InputMessage) and item.role != "assistant":
        role = "system" if item.role == "developer" else item.role
        messages.append({"role": role, "content": _content(item)})
        return
    answer = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    if answer is None or (isinstance(item, InputMessage) and answer["content"] is not None):
        answer = {"role": "assistant", "content": None}
        messages.append(answer)
    if isinstance(item, InputMessage):
        answer["content"] = _content(item)
    elif isinstance(item, FunctionCallItem):
        function = {"name": item.name, "arguments": item.arguments}
        call = {"id": item.call_id, "type": "function", "function": function}
        answer.setdefault("tool_calls", []).append(call)
    else:
        texts = [part.text for part in item.content or item.summary]
        answer["reasoning_content"] = answer.get("reasoning_content", "") + "".join(texts)


def _content(message: InputMessage) -> str | list[Json]:
    if isinstance(message.content, str):
        return message.content
    if all(isinstance(part, InputText) for part in message.content):
        return "".join(part.text for part in message.content if isinstance(part, InputText))
    parts: list[Json] = []
    for part in message.content:
        if isinstance(part, InputText):
            parts.append({"type": "text", "text": part.text})
        else:
            parts.append({"type": "image_url", "image_url": {"url": part.image_url}})
    return parts


class ResponseWriter:
    """Write a response from the parts of a chat's answer, and the events of its stream.

    Args:
        body: The request.
        model: Name of the model.
    """

    def __init__(self, body: ResponsesRequest, model: str) -> None:
        given = body.model_dump(exclude_none=True, by_alias=True)
        self._events = 0
        self._open: Json | None = None  # the item that grows
        self.response: Json = {
            "id": f"resp_{secrets.token_hex(16)}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": model,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": given.get("reasoning", {"effort": None, "summary": None}),
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": given.get("text", {"format": {"type": "text"}}),
            "tool_choice": given.get("tool_choice", "auto"),
            "tools": given.get("tools", []),
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
        }

    def begin(self) -> list[Json]:
        """Return the events of a response that has no output yet."""
        return [self._whole("response.created"), self._whole("response.in_progress")]

    def add(self, delta: Mapping[str, Any]) -> list[Json]:
        """Add the delta of a chat's chunk, or a complete message; return its events."""
        events: list[Json] = []
        if delta.get("reasoning_content"):
            events += self._add_text("reasoning", delta["reasoning_content"])
        if delta.get("content"):
            events += self._add_text("message", delta["content"])
        for call in delta.get("tool_calls") or ():
            events += self._add_call(call)
        return events

    def finish(self, reason: str | None, usage: Mapping[str, Any]) -> list[Json]:
        """End the response.

        Args:
            reason: The finish reason of the chat.
            usage: The token counts of the chat.
        """
        is_complete = reason != "length"
        events = self._close("completed" if is_complete else "incomplete")
        self.response["status"] = "completed" if is_complete else "incomplete"
        if not is_complete:
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        # no cache is kept for a promised time, which is what its writing would cost at OpenAI
        input_details = {**usage["prompt_tokens_details"], "cache_write_tokens": 0}
        self.response["usage"] = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": input_details,
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        }
        return [
            *events,
            self._whole("response.completed" if is_complete else "response.incomplete"),
        ]

    def write_whole(self, answer: Mapping[str, Any]) -> Json:
        """Return the response for the complete answer of a chat."""
        (choice,) = answer["choices"]
        self.add(choice["message"])
        self.finish(choice["finish_reason"], answer["usage"])
        return self.response

    def _add_text(self, kind: Literal["message", "reasoning"], text: str) -> list[Json]:
        events: list[Json] = []
        if self._open is None or self._open["type"] != kind:
            events += self._close("completed")
            events += self._open_item(kind)
        assert self._open is not None
        self._open["content"][0]["text"] += text
        name = (
            "response.output_text.delta" if kind == "message" else "response.reasoning_text.delta"
        )
        more = {"logprobs": []} if kind == "message" else {}
        events.append(self._event(name, **self._item_fields(), content_index=0, delta=text, **more))
        return events

    def _open_item(self, kind: Literal["message", "reasoning"]) -> list[Json]:
        item: Json = {"type": kind, "status": "in_progress"}
        if kind == "message":
            part: Json = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item |= {"id": f"msg_{secrets.token_hex(16)}", "role": "assistant"}
        else:
            part = {"type": "reasoning_text", "text": ""}
            item |= {"id": f"rs_{secrets.token_hex(16)}", "summary": []}
        self._open = item
        self.response["output"].append(item)
        added = self._event(
            "response.output_item.added",
            output_index=self._index,
            item={**item, "content": []},
        )
        item["content"] = [part]
        opened = self._event(
            "response.content_part.added", **self._item_fields(), content_index=0, part=dict(part)
        )
        return [added, opened]

    def _close(self, status: str) -> list[Json]:
        """End the item that grows, if any."""
        item = self._open
        if item is None:
            return []
        (part,) = item["content"]
        item["status"] = status
        is_message = item["type"] == "message"
        name = "response.output_text.done" if is_message else "response.reasoning_text.done"
        more = {"logprobs": []} if is_message else {}
        part_fields = {**self._item_fields(), "content_index": 0}
        events = [
            self._event(name, **part_fields, text=part["text"], **more),
            self._event("response.content_part.done", **part_fields, part=dict(part)),
            self._event("response.output_item.done", output_index=self._index, item=_copy(item)),
        ]
        self._open = None
        return events

    def _add_call(self, call: Mapping[str, Any]) -> list[Json]:
        events = self._close("completed")
        arguments = call["function"]["arguments"]
        item = {
            "type": "function_call",
            "id": f"fc_{secrets.token_hex(16)}",
            "call_id": call["id"],
            "name": call["function"]["name"],
            "arguments": arguments,
            "status": "completed",
        }
        self.response["output"].append(item)
        item_fields = {"item_id": item["id"], "output_index": self._index}
        begun = {**item, "arguments": "", "status": "in_progress"}
        done = "response.function_call_arguments.done"
        return [
            *events,
            self._event("response.output_item.added", output_index=self._index, item=begun),
            self._event("response.function_call_arguments.delta", **item_fields, delta=arguments),
            self._event(done, **item_fields, name=item["name"], arguments=arguments),
            self._event("response.output_item.done", output_index=self._index, item=dict(item)),
        ]

    @property
    def _index(self) -> int:
        return len(self.response["output"]) - 1

    def _item_fields(self) -> Json:
        """Return the fields of an event that name the item that grows."""
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": self._index}

    def _whole(self, name: str) -> Json:
        output = [_copy(item) for item in self.response["output"]]
        return self._event(name, response={**self.response, "output": output})

    def _event(self, kind: str, **values: Any) -> Json:
        event = {"type": kind, "sequence_number": self._events, **values}
        self._events += 1
        return event


def _copy(item: Json) -> Json:
    if "content" not in item:
        return dict(item)
    return {**item, "content": [dict(part) for part in item["content"]]}
