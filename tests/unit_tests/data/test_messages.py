# SPDX-License-Identifier: Apache-2.0
"""Records in all known forms, and what is refused about them."""

import pytest

from megatron.bridge.data.messages import Chat, Pair, Text, parse
from megatron.bridge.utils.errors import UserError

USER, BOT = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}


def test_plain_forms():
    assert parse({"prompt": "a", "completion": "b", "id": 3}, "x") == Pair("a", "b")
    assert parse({"input": "a", "output": "b"}, "x") == Pair("a", "b")
    assert parse({"text": "a", "url": "u"}, "x") == Text("a")
    assert parse({"prompt": "a", "prompt_id": 1, "messages": [USER, BOT]}, "x") == Chat([USER, BOT])


def test_openai_messages_are_cleaned():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    record = {
        "messages": [
            USER | {"name": None, "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]},
            {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
            {"role": "tool", "content": "1", "tool_call_id": "1"},
            BOT | {"weight": 0},
        ],
        "tools": '[{"type": "function"}]',
        "chat_template_kwargs": {"enable_thinking": False},
    }
    parsed_call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    assert parse(record, "x") == Chat(
        [
            USER,
            {"role": "assistant", "content": "", "tool_calls": [parsed_call], "reasoning_content": "hm"},
            {"role": "tool", "content": "1", "tool_call_id": "1"},
            BOT,
        ],
        tools=[{"type": "function"}],
        excluded=frozenset({3}),
        template_options={"enable_thinking": False},
    )


def test_sharegpt_turns():
    turns = [
        {"from": "human", "value": "hi"},
        {"from": "function_call", "value": '{"name": "f", "arguments": {"a": 1}}'},
        {"from": "observation", "value": "1"},
        {"from": "gpt", "value": "yo"},
    ]
    chat = parse({"conversations": turns, "system": "s", "tools": ""}, "x")
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    assert chat == Chat(
        [
            {"role": "system", "content": "s"},
            USER,
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "1"},
            BOT,
        ]
    )


def test_conversational_prompt_and_completion():
    chat = parse({"prompt": [USER], "completion": [BOT]}, "x")
    assert (chat.messages, chat.completion_start) == ([USER, BOT], 1)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"question": "a"}, r"x: expected messages, .* the keys are: question"),
        ({"messages": [USER], "text": "a"}, r"the record has messages and also text: keep one"),
        ({"instruction": "a", "input": "b", "output": "c"}, r"the key instruction .* process_example_fn"),
        ({"messages": []}, "messages must be a list with at least one message"),
        ({"messages": [{"role": "asistant", "content": ""}]}, r"message 1: role='asistant' .* mean assistant"),
        ({"messages": [USER, 3]}, "message 2: it must be an object with role and content, not int"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "a content part of type image is no"),
        ({"messages": [BOT | {"weight": 0.5}]}, r"weight=0.5 must be 0 .* or 1"),
        ({"messages": [BOT | {"tool_calls": [{"function": {}}]}]}, "a tool call needs a function with a name"),
        (
            {"messages": [BOT | {"tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            "the arguments of f are not JSON",
        ),
        (
            {"messages": [BOT | {"tool_calls": [{"function": {"name": "f", "arguments": 5}}]}]},
            "the arguments of f must be an object, not int",
        ),
        (
            {"messages": [{"role": "user", "contnet": "hi"}]},
            "message 1: it has no content; its keys are: contn",
        ),
        ({"messages": [USER], "chat_template_kwargs": "x"}, "chat_template_kwargs must be an object, not str"),
        ({"messages": [USER], "tools": "{"}, "tools are not JSON"),
        ({"messages": [USER], "tools": [1]}, "tools must be a list of objects"),
        ({"conversations": [{"from": "bott", "value": ""}]}, r"from='bott' is none of .* did you mean bot"),
        ({"conversations": [{"from": ["human"], "value": "a"}]}, r"from=\['human'\] is none of"),
        (
            {"conversations": [{"from": "human", "text": "a"}]},
            "it has no value; its keys are: from, text",
        ),
        ({"prompt": [USER], "completion": "b"}, "so completion must be one too"),
        ({"text": 3}, "text must be a text, not int"),
    ],
)
def test_what_is_wrong_is_named(record, message):
    with pytest.raises(UserError, match=message):
        parse(record, "x")
