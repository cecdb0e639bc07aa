# SPDX-License-Identifier: Apache-2.0
"""Prepare a conversation: its prompt, what its answer may be, and how to read the answer."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megatron.bridge.inference.conversations.answer_reader import AnswerFormat
from megatron.bridge.inference.conversations.options import (
    OPTION_NAMES,
    ConversationOptions,
    NamedTool,
    Tool,
    read_options,
)
from megatron.bridge.inference.conversations.tool_parsers import (
    JSON_FORMAT,
    ForcedCall,
    ReasoningFormat,
    ToolFormat,
    find_reasoning_format,
    find_tool_format,
)
from megatron.bridge.inference.grammars import (
    added_ids_by_text,
    after_harmony_reasoning,
    after_reasoning,
    json_rule,
    mark_expression,
)
from megatron.bridge.inference.prompts import Messages, PromptReader
from megatron.bridge.inference.requests import Sampling
from megatron.bridge.utils.errors import UserError, did_you_mean

_ARGUMENTS_OF_RENDERING = frozenset(
    (
        "messages",
        "conversations",
        "tools",
        "documents",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "return_assistant_tokens_mask",
    )
)
_TAIL = 32  # tokens at the end of a prompt in which a mark of reasoning may be


class FieldError(UserError):
    """A field of a request that this model cannot follow.

    Attributes:
        field: Name of the field, with which the message begins.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True)
class ChatPlan:
    """What is computed for a conversation.

    Attributes:
        prompt: token ids.
        answer_format: how to read the answer; None if all of it is content.
        changes: values of ``Sampling`` that follow from tools, reasoning and response format.
    """

    prompt: list[int]
    answer_format: AnswerFormat | None
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def sampling_changes(self) -> dict[str, Any]:
        """The values of ``changes`` that are not empty, in a new mapping."""
        return {name: value for name, value in self.changes.items() if value}


def plan_chat(
    reader: PromptReader,
    messages: Messages,
    options: ConversationOptions,
    tool_parser: str | None = None,
    location: str = "messages",
    continues: bool = False,
) -> ChatPlan:
    """Render a conversation and find out how to read the answer.

    Args:
        reader: Converts the conversation to tokens.
        messages: Its messages, or a record with ``messages`` and images.
        options: Tools, and what else the answer should be.
        tool_parser: Name of the format of calls; None takes the one of the chat template.
        location: What messages of errors begin with.
        continues: The last message is the beginning of the answer, which the model continues.

    Raises:
        FieldError: The chat template does not render the tools, or has no such option.
        UserError: The chat template refuses the conversation.
    """
    reader.check_tokenizer(location)
    tools = options.offered_tools
    tool_records = [tool.as_record() for tool in tools]
    source = reader.template_source(tool_records)
    if tools and not _reads(source, "tools"):
        raise FieldError(
            "tools",
            "tools: the chat template of this model does not render tools: leave them out, send tool_choice=none, "
            "or use a --chat-template that does",
        )
    record = dict(messages) if isinstance(messages, Mapping) else {"messages": messages}
    prompt = reader.tokens(
        {
            **record,
            "tools": tool_records,
            "chat_template_kwargs": template_options(
                reader, source, options.chat_template_kwargs, options.reasoning_effort
            ),
        },
        location,
        continues,
    )
    return plan_answer(reader, options, prompt, source, find_tool_format(source, tool_parser))


def plan_conversation(
    reader: PromptReader,
    conversation: Messages,
    sampling: Sampling,
    tool_parser: str | None = None,
    location: str = "the conversation",
) -> tuple[ChatPlan, Sampling]:
    """Return the plan of a conversation that has its options in itself, and its sampling.

    Args:
        reader: Converts the conversation to tokens.
        conversation: Messages, or a record with ``messages``, images, and fields of
            ``ConversationOptions``.
        sampling: Sampling that the caller asks for.
        tool_parser: Name of the format of calls; None takes the one of the chat template.
        location: What messages of errors begin with.
    """
    record: Mapping[str, Any] = (
        conversation if isinstance(conversation, Mapping) else {"messages": conversation}
    )
    given = {name: value for name, value in record.items() if name in OPTION_NAMES}
    rest = {name: value for name, value in record.items() if name not in OPTION_NAMES}
    try:
        plan = plan_chat(reader, rest, read_options(given), tool_parser, location)
    except FieldError as error:
        raise UserError(f"{location}: {error}") from error
    changes = plan.sampling_changes
    if "grammar" in changes and sampling.grammar is not None:
        raise UserError(
            f"{location}: grammar and the format of the answer, or a call that is demanded, exclude each other: remove "
            "one"
        )
    if "shown_ids" in changes:
        changes["shown_ids"] = (*sampling.shown_ids, *changes["shown_ids"])
    return plan, replace(sampling, **changes)


def plan_answer(
    reader: PromptReader,
    options: ConversationOptions,
    prompt: list[int],
    source: str,
    tool_format: ToolFormat,
) -> ChatPlan:
    """Find out how to read the answer to a prompt that is already tokenized.

    Args:
        reader: Has the tokenizer.
        options: Tools, and what else the answer should be.
        prompt: The tokens, which may end inside of reasoning.
        source: The chat template.
        tool_format: How the model writes calls.
    """
    tools = options.offered_tools
    is_harmony = tool_format.name == "harmony"
    added_ids = added_ids_by_text(reader.hf)
    reasoning = None
    has_begun = False
    if not is_harmony:
        reasoning, has_begun = _reasoning_of_prompt(reader.hf, prompt, source)
    grammar = options.grammar()
    is_forced = options.tool_choice == "required" or isinstance(options.tool_choice, NamedTool)
    if is_forced:
        if tool_format.forced is None:
            tool_format = JSON_FORMAT
        grammar = _forced_grammar(tool_format, _forced_tools(options), options, added_ids)
    if grammar is not None and reasoning is not None:
        grammar = after_reasoning(grammar, reasoning.begin, reasoning.end, has_begun, added_ids)
    elif grammar is not None and is_harmony and not is_forced:
        grammar = after_harmony_reasoning(grammar, added_ids)
    if not tools and reasoning is None and not is_harmony:
        return ChatPlan(prompt, None, {"grammar": grammar})
    answer_format = AnswerFormat(
        tool_format if tools or is_harmony else None,
        {tool.function.name: tool.function.parameters or {} for tool in tools},
        reasoning,
        has_begun,
        options.parallel_tool_calls is not False,
    )
    shown_ids = [added_ids[mark] for mark in answer_format.marks if mark in added_ids]
    return ChatPlan(prompt, answer_format, {"grammar": grammar, "shown_ids": shown_ids})


def _reads(source: str, name: str) -> bool:
    """Return whether a chat template mentions a variable."""
    return re.search(rf"\b{re.escape(name)}\b", source) is not None


def template_options(
    reader: PromptReader, source: str, given: Mapping[str, Any] | None, effort: str | None
) -> dict[str, Any]:
    """Return the variables of a chat template that a request sets.

    Args:
        reader: Has the tokenizer.
        source: The chat template.
        given: ``chat_template_kwargs`` of the request.
        effort: ``reasoning_effort`` of the request.

    Raises:
        FieldError: The chat template does not read one of them.
    """
    given = dict(given or {})
    reserved = _ARGUMENTS_OF_RENDERING | reader.hf.special_tokens_map.keys()
    names = sorted(set(re.findall(r"\b[A-Za-z_]\w*\b", source)) - reserved)
    for name in given:
        if name in reserved:
            raise FieldError(
                "chat_template_kwargs",
                f"chat_template_kwargs.{name:.70} is set by the server: leave it out",
            )
        if name not in names:
            hint = did_you_mean(name, names)
            raise FieldError(
                "chat_template_kwargs",
                f"chat_template_kwargs.{name:.70} is not read by the chat template of this model{hint}: leave it out",
            )
    return _effort_options(source, effort) | given


def _effort_options(source: str, effort: str | None) -> dict[str, Any]:
    """Return the variables by which a template knows ``reasoning_effort``; other templates do not."""
    if effort is None:
        return {}
    if _reads(source, "reasoning_effort"):
        return {"reasoning_effort": effort}
    for switch in ("enable_thinking", "thinking"):
        if re.search(rf"\b{switch}\s+is\s+(not\s+)?(defined|false|true)\b", source):
            return {switch: effort != "none"}
    return {}


def _reasoning_of_prompt(
    hf: Any, prompt: list[int], source: str
) -> tuple[ReasoningFormat | None, bool]:
    """Return the marks of reasoning that the answer may have, and whether it begins inside of reasoning."""
    reasoning = find_reasoning_format(source)
    if reasoning is None:
        return None, False
    tail = hf.decode(prompt[-_TAIL:], skip_special_tokens=False).rstrip()
    if tail.endswith(reasoning.end):
        return None, False
    return reasoning, tail.endswith(reasoning.begin.rstrip())


def _forced_tools(options: ConversationOptions) -> list[Tool]:
    if not isinstance(options.tool_choice, NamedTool):
        return options.offered_tools
    chosen = options.tool_choice.function.name
    return [tool for tool in options.offered_tools if tool.function.name == chosen]


def _forced_grammar(
    tool_format: ToolFormat,
    tools: list[Tool],
    options: ConversationOptions,
    added_ids: Mapping[str, int],
) -> str:
    """Return the grammar of answers that are calls of these tools."""
    form: ForcedCall | None = tool_format.forced
    assert form is not None

    def expression(text: str) -> str:
        return mark_expression(text, added_ids)

    has_one = isinstance(options.tool_choice, NamedTool) or options.parallel_tool_calls is False
    more = "" if has_one else f"({expression(form.between)} call)*"
    rules = [f"start: {expression(form.first)} call {more} {expression(form.last)}"]
    names = [f"call_{index}" for index in range(len(tools))]
    rules.append(f"call: {' | '.join(names)}")
    for name, tool in zip(names, tools, strict=True):
        before = expression(form.before.replace("NAME", tool.function.name))
        schema = {"type": "object", **(tool.function.parameters or {})}
        rules.append(f"{name}: {before} {name}_arguments {expression(form.after)}")
        rules.append(f"{name}_arguments: {json_rule(schema)}")
    return "\n".join(rules)
