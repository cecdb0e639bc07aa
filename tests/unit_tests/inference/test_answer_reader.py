# SPDX-License-Identifier: Apache-2.0
"""Calls and reasoning in answers of each family, whole and in pieces of any size."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.bridge.inference.conversations.answer_reader import AnswerFormat
from megatron.bridge.inference.conversations.tool_parsers import (
    FORMAT_NAMES,
    Call,
    ReasoningFormat,
    find_reasoning_format,
    find_tool_format,
)
from megatron.bridge.utils.errors import UserError

SCHEMAS = {
    "weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    },
    "time": {"type": "object", "properties": {}},
}
DSML = "\uff5cDSML\uff5c"
ROME = ("weather", {"city": "Rome", "days": 2})
TIME = ("time", {})
# name, sign in a template, an answer, its content, its reasoning, its calls
ANSWERS = [
    (
        "hermes",
        "<tool_call>",
        'I look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>\n'
        '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>',
        "I look.",
        "",
        [ROME, TIME],
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=x>",
        "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=time>\n</function>\n</tool_call>",
        "",
        "",
        [ROME, TIME],
    ),
    (
        "glm45",
        "<tool_call>{{ name }}<arg_key>",
        "I look.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>2</arg_value>\n</tool_call>",
        "I look.",
        "",
        [ROME],
    ),
    (
        "llama3_json",
        "<|python_tag|>",
        '{"name": "weather", "parameters": {"city": "Rome", "days": 2}}; {"name": "time", "parameters": {}}',
        "",
        "",
        [ROME, TIME],
    ),
    (
        "llama3_json",
        "<|python_tag|>",
        '<|python_tag|>{"name": "weather", "parameters": {"city": "Rome", "days": 2}}',
        "",
        "",
        [ROME],
    ),
    ("pythonic", "func_name1(", '[weather(city="Rome", days=2), time()]', "", "", [ROME, TIME]),
    (
        "mistral",
        "[TOOL_CALLS]",
        '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Rome", "days": 2}}, {"name": "time"}]',
        "",
        "",
        [ROME, TIME],
    ),
    (
        "mistral",
        "[TOOL_CALLS]",
        'I look.[TOOL_CALLS]weather[ARGS]{"city": "Rome", "days": 2}[TOOL_CALLS]time[ARGS]{}',
        "I look.",
        "",
        [ROME, TIME],
    ),
    (
        "deepseek",
        "<\uff5ctool▁call▁begin\uff5c>",
        "<\uff5ctool▁calls▁begin\uff5c><\uff5ctool▁call▁begin\uff5c>function<\uff5ctool▁sep\uff5c>weather\n```json\n"
        '{"city": "Rome", "days": 2}\n```<\uff5ctool▁call▁end\uff5c><\uff5ctool▁calls▁end\uff5c>',
        "",
        "",
        [ROME],
    ),
    (
        "deepseek",
        "<\uff5ctool▁call▁begin\uff5c>",
        "I look.<\uff5ctool▁calls▁begin\uff5c><\uff5ctool▁call▁begin\uff5c>weather<\uff5ctool▁sep\uff5c>"
        '{"city": "Rome", "days": 2}<\uff5ctool▁call▁end\uff5c>'
        "<\uff5ctool▁call▁begin\uff5c>time<\uff5ctool▁sep\uff5c>{}<\uff5ctool▁call▁end\uff5c>"
        "<\uff5ctool▁calls▁end\uff5c>",
        "I look.",
        "",
        [ROME, TIME],
    ),
    (
        "kimi_k2",
        "<|tool_calls_section_begin|>",
        "I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
        '{"city": "Rome", "days": 2}<|tool_call_end|><|tool_calls_section_end|>',
        "I look.",
        "",
        [ROME],
    ),
    (
        "harmony",
        "<|channel|>",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
        '<|constrain|>json<|message|>{"city": "Rome", "days": 2}<|call|>',
        "",
        "Hm.",
        [ROME],
    ),
    (
        "harmony",
        "<|channel|>",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Sun",
        "Sun",
        "Hm.",
        [],
    ),
    (
        "deepseek_v32",
        f"<{DSML}function_calls>",
        f'I look.\n\n<{DSML}function_calls>\n<{DSML}invoke name="weather">\n'
        f'<{DSML}parameter name="city" string="true">Rome</{DSML}parameter>\n'
        f'<{DSML}parameter name="days" string="false">2</{DSML}parameter>\n</{DSML}invoke>\n'
        f'<{DSML}invoke name="time">\n</{DSML}invoke>\n</{DSML}function_calls>',
        "I look.",
        "",
        [ROME, TIME],
    ),
    (
        "granite",
        "<|tool_call|>",
        '<|tool_call|>[{"name": "weather", "arguments": {"city": "Rome", "days": 2}}]',
        "",
        "",
        [ROME],
    ),
    (
        "nemotron_json",
        "<TOOLCALL>",
        '<TOOLCALL>[{"name": "weather", "arguments": {"city": "Rome", "days": 2}}]</TOOLCALL>',
        "",
        "",
        [ROME],
    ),
    (
        "gemma4",
        "<|tool_call>",
        '<|tool_call>call:weather{city:<|"|>Rome<|"|>,days:2}<tool_call|>',
        "",
        "",
        [ROME],
    ),
    (
        "function_gemma",
        "<start_function_call>",
        "<start_function_call>call:weather{city:<escape>Rome<escape>,days:2}<end_function_call>",
        "",
        "",
        [ROME],
    ),
    ("json", "", '{"name": "weather", "parameters": {"city": "Rome", "days": 2}}', "", "", [ROME]),
]


def read(answer_format, pieces):
    """Content, reasoning and calls of an answer."""
    reader = answer_format.make_reader()
    parts = [part for piece in pieces for part in reader.add(piece)]
    parts += reader.add("", is_over=True)
    texts = {"content": "", "reasoning": ""}
    calls = []
    for part in parts:
        if isinstance(part, Call):
            calls.append((part.name, json.loads(part.arguments)))
        else:
            texts[part.kind] += part.text
    return texts["content"], texts["reasoning"], calls


@pytest.mark.parametrize(
    ("name", "sign", "text", "content", "reasoning", "calls"),
    ANSWERS,
    ids=[f"{row[0]}-{number}" for number, row in enumerate(ANSWERS)],
)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_each_format_whole_and_in_pieces(name, sign, text, content, reasoning, calls, data):
    assert find_tool_format(f"x {sign} y").name == name
    answer_format = AnswerFormat(find_tool_format("", name), SCHEMAS)
    expected = (content, reasoning, calls)
    assert read(answer_format, [text]) == expected
    assert read(answer_format, text) == expected
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(answer_format, pieces) == expected


def test_every_format_has_an_example():
    assert {row[0] for row in ANSWERS} | {"phi4_mini"} == set(FORMAT_NAMES)


MALFORMED = [
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": }</tool_call>'),
    ("hermes", '<tool_call>{"name": "weather", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": 3}</tool_call> and more'),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Ro'),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"x": NaN}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"x": 1e999}}</tool_call>'),
    ("hermes", "<tool_call>" + "[" * 100_000 + "</tool_call>"),
    ("hermes", "a <tool_call"),
    ("qwen3_coder", "<tool_call><function=weather>city</function></tool_call>"),
    ("glm45", "<tool_call>two words</tool_call>"),
    ("llama3_json", '{"name": "Ada", "parameters": {}}'),
    ("llama3_json", '{"answer": 42}'),
    ("llama3_json", "It is {not} JSON"),
    ("pythonic", "[1, 2, 3]"),
    ("pythonic", "[weather(__import__('os').getcwd())]"),
    ("pythonic", "[weather(city=open('x'))]"),
    ("pythonic", "[" * 5000),
    ("mistral", "[TOOL_CALLS]weather"),
    ("deepseek", "<\uff5ctool▁call▁begin\uff5c>weather<\uff5ctool▁call▁end\uff5c>"),
    ("kimi_k2", "<|tool_call_begin|>functions.weather:0<|tool_call_end|>"),
    ("gemma4", "<|tool_call>call:weather{city:Rome}<tool_call|>"),
]


@pytest.mark.parametrize(("name", "text"), MALFORMED)
def test_what_is_no_call_is_text(name, text):
    answer_format = AnswerFormat(find_tool_format("", name), SCHEMAS)
    assert read(answer_format, [text]) == (text, "", [])
    assert read(answer_format, [text[:7], text[7:]]) == (text, "", [])


@settings(max_examples=150, deadline=None)
@given(name=st.sampled_from(FORMAT_NAMES), data=st.data())
def test_random_marks_never_fail(name, data):
    tool_format = find_tool_format("", name)
    words = [
        *tool_format.marks,
        "weather",
        "{",
        "}",
        "[",
        "]",
        '"',
        ":",
        "<think>",
        "</think>",
        " ",
        "\n",
        "a(",
        ")",
    ]
    text = "".join(data.draw(st.lists(st.sampled_from(words), max_size=20)))
    reasoning = ReasoningFormat("<think>", "</think>")
    answer_format = AnswerFormat(tool_format, SCHEMAS, reasoning)
    assert read(answer_format, text) == read(answer_format, [text])


def test_a_mark_inside_of_an_argument():
    text = '<tool_call>{"name": "weather", "arguments": {"city": "</tool_call>\\"x"}}</tool_call>'
    answer_format = AnswerFormat(find_tool_format("", "hermes"), SCHEMAS)
    assert read(answer_format, text)[2] == [("weather", {"city": '</tool_call>"x'})]


def test_a_good_call_behind_a_malformed_one():
    bad, good = "<tool_call>{]</tool_call>", '<tool_call>{"name": "time"}</tool_call>'
    answer_format = AnswerFormat(find_tool_format("", "hermes"), SCHEMAS)
    assert read(answer_format, bad + good) == (bad, "", [TIME])


@pytest.mark.parametrize(
    ("text", "has_begun", "expected"),
    [
        ("<think>\nHm. \n</think>\n\nSun\n", False, ("Sun\n", "Hm.", [])),
        ("Hm.</think>Sun", True, ("Sun", "Hm.", [])),
        ("Hm. <think", True, ("", "Hm. <think", [])),
        ("\n<think>", False, ("", "", [])),
        ("\n<thin", False, ("\n<thin", "", [])),
        ("Sun <think>x</think>", False, ("Sun <think>x</think>", "", [])),
        ("  Sun  ", False, ("  Sun  ", "", [])),
    ],
)
def test_reasoning(text, has_begun, expected):
    reasoning = find_reasoning_format("{{ x.split('</think>') }}")
    answer_format = AnswerFormat(None, {}, reasoning, has_begun)
    assert read(answer_format, [text]) == read(answer_format, text) == expected


def test_an_unknown_format_names_the_nearest():
    with pytest.raises(UserError, match=r"tool_parser='hermse'.*hermes"):
        find_tool_format("", "hermse")
