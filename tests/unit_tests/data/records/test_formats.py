# SPDX-License-Identifier: Apache-2.0
"""Records in all known forms, and what is refused about them."""

import pytest

from megatron.bridge.data.records.formats import Chat, PromptCompletion, Text, parse
from megatron.bridge.data.records.presets import alpaca_example
from megatron.bridge.utils.config.names import locate
from megatron.bridge.utils.errors import UserError
from tests.refusals import refused

USER, BOT = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}


def test_plain_forms():
    assert parse({"prompt": "a", "completion": "b", "id": 3}, "x") == PromptCompletion("a", "b")
    assert parse({"input": "a", "output": "b"}, "x") == PromptCompletion("a", "b")
    assert parse({"text": "a", "url": "u"}, "x") == Text("a")
    assert parse({"prompt": "a", "prompt_id": 1, "messages": [USER, BOT]}, "x") == Chat([USER, BOT])


def test_openai_messages_are_cleaned():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    record = {
        "messages": [
            USER
            | {
                "name": None,
                "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}],
            },
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
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [parsed_call],
                "reasoning_content": "hm",
            },
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
    ("record", "parts"),
    [
        ({"question": "a"}, ("expected messages, ", "question")),
        ({"messages": [USER], "text": "a"}, ("messages and text", "keep one")),
        ({"instruction": "a", "input": "b", "output": "c"}, ("instruction", "process_example_fn")),
        ({"messages": []}, ("messages", "list", "at least one")),
        (
            {"messages": [{"role": "asistant", "content": ""}]},
            ("message 1: role='asistant'", "did you mean assistant?"),
        ),
        ({"messages": [USER, 3]}, ("message 2: ", "role and content", "int")),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            ("message 1: ", "one image for each"),
        ),
        ({"messages": [BOT | {"weight": 0.5}]}, ("message 1: weight=0.5", "0 ", "1")),
        (
            {"messages": [BOT | {"tool_calls": [{"function": {}}]}]},
            ("message 1: ", "tool call", "function with a name"),
        ),
        (
            {"messages": [BOT | {"tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            ("message 1: the arguments of f", "JSON", "column"),
        ),
        (
            {"messages": [BOT | {"tool_calls": [{"function": {"name": "f", "arguments": 5}}]}]},
            ("message 1: the arguments of f", "object", "int"),
        ),
        ({"messages": [{"role": "user", "contnet": "hi"}]}, ("message 1: ", "content", "contnet")),
        (
            {"messages": [USER], "chat_template_kwargs": "x"},
            ("chat_template_kwargs", "object", "str"),
        ),
        ({"messages": [USER], "tools": "{"}, ("tools", "JSON")),
        ({"messages": [USER], "tools": [1]}, ("tools", "list of objects")),
        (
            {"conversations": [{"from": "bott", "value": ""}]},
            ("message 1: from='bott'", "did you mean bot"),
        ),
        (
            {"conversations": [{"from": ["human"], "value": "a"}]},
            ("message 1: from=['human']", "human"),
        ),
        (
            {"conversations": [{"from": "human", "text": "a"}]},
            ("message 1: ", "value", "from, text"),
        ),
        ({"prompt": [USER], "completion": "b"}, ("prompt", "completion", "list")),
        ({"text": 3}, ("text", "string", "int")),
    ],
)
def test_what_is_wrong_is_named(record, parts):
    with refused("x: ", *parts):
        parse(record, "x")


def test_alpaca():
    """Named by ``process_example_fn``, since other datasets use its keys otherwise."""
    record = {
        "instruction": "Add.",
        "input": "1 + 1",
        "output": "2",
        "history": [["Hi", "Hello"]],
        "id": 7,
    }
    chat = parse(locate("alpaca_example")({**record, "system": "Calculate."}), "x")
    said = [(message["role"], message["content"]) for message in chat.messages]
    assert said == [
        ("system", "Calculate."),
        ("user", "Hi"),
        ("assistant", "Hello"),
        ("user", "Add.\n1 + 1"),
        ("assistant", "2"),
    ]
    assert (
        alpaca_example({"instruction": "a", "input": "", "output": "b"})["messages"][0]["content"]
        == "a"
    )
    assert alpaca_example(record)["id"] == 7
    with pytest.raises(UserError, match=r"output .*dataset\.process_example_fn"):
        alpaca_example({"instruction": "a", "response": "b"})
