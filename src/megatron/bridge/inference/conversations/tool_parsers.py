# SPDX-License-Identifier: Apache-2.0
"""How model families write calls of tools, and where their reasoning is.

A family's format is a row of ``TOOL_FORMATS``: the marks around its calls, and a function that reads what is between
them. The chat template shows which format a model was trained on, because it writes earlier calls in it.
"""

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.bridge.utils.errors import UserError, did_you_mean

_SEPARATORS = " \t\r\n;,"  # between JSON calls
_MOST_CHARACTERS = 1 << 20  # of the text of calls


@dataclass(frozen=True)
class Call:
    """A call of a tool."""

    name: str
    arguments: str  # a JSON object
    id: str | None = None  # the model's own name of the call


Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON schemas of the parameters by name of the tool."""
ReadCalls = Callable[[str, Schemas], list[Call]]
"""Read the text between the marks of a call; raises ``ValueError`` for a text that is no call."""


@dataclass(frozen=True)
class ForcedCall:
    """The text around the arguments of a call that the model is forced to write; ``NAME`` is the tool's."""

    before: str  # before the arguments of a call
    after: str  # behind them
    first: str = ""  # before the first call
    between: str = "\n"  # between two calls
    last: str = ""  # behind the last call


@dataclass(frozen=True)
class ToolFormat:
    """How a family writes calls.

    Attributes:
        name: value of ``--tool-parser``.
        signs: texts of which a chat template has at least one if its model was trained on the format.
        begin: mark before a call; empty if a call is the entire answer.
        read: reads the text of one or several calls.
        end: mark behind a call; None if calls go on to the end of the answer.
        wrappers: marks that are left out.
        openings: characters with which an answer that is a call begins, if there is no mark.
        forced: how to write a call with JSON arguments; None writes JSON without marks.
        id_pattern: ``call`` for OpenAI's ids of calls, ``short`` for Mistral's 9 letters.
    """

    name: str
    signs: tuple[str, ...]
    begin: str
    read: ReadCalls
    end: str | None = None
    wrappers: tuple[str, ...] = ()
    openings: str = ""
    forced: ForcedCall | None = None
    id_pattern: str = "call"
    more_marks: tuple[str, ...] = field(default=())  # inside of calls

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks, which are special tokens in some tokenizers."""
        marks = (self.begin, self.end or "", *self.wrappers, *self.more_marks)
        return tuple(mark for mark in marks if mark)


def _dump_arguments(arguments: Any) -> str:
    """Return the JSON text of arguments; some models write it as a text in JSON."""
    if isinstance(arguments, str):
        arguments = _parse_json(arguments or "{}")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise ValueError("arguments must be an object")
    return json.dumps(arguments, ensure_ascii=False, allow_nan=False)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_JSON = json.JSONDecoder(strict=False, parse_constant=_refuse_constant)


def _parse_json(text: str) -> Any:
    return _JSON.decode(text.strip())


def read_json_calls(text: str, schemas: Schemas) -> list[Call]:
    """Read JSON objects with ``name`` and ``arguments`` (or ``parameters``), or lists of them."""
    values: list[Any] = []
    position = 0
    while True:
        while position < len(text) and text[position] in _SEPARATORS:
            position += 1
        if position == len(text):
            break
        value, position = _JSON.raw_decode(text, position)
        values += value if isinstance(value, list) else [value]
    if not values:
        raise ValueError("no call")
    return [_read_json_call(value) for value in values]


def _read_json_call(value: Any) -> Call:
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = {**value, **value["function"]}
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or not name:
        raise ValueError("a call needs a name")
    arguments = value.get("arguments", value.get("parameters"))
    call_id = value.get("id")
    return Call(name, _dump_arguments(arguments), call_id if isinstance(call_id, str) else None)


def read_known_json_calls(text: str, schemas: Schemas) -> list[Call]:
    """Read JSON without marks: an object is a call only if it names one of the tools."""
    calls = read_json_calls(text, schemas)
    if any(call.name not in schemas for call in calls):
        raise ValueError("not the name of a tool")
    return calls


def _typed_value(text: str, schema: Mapping[str, Any]) -> Any:
    """Return the value of a parameter that is written without quotes: its schema says what it is."""
    kinds = schema.get("type") if isinstance(schema, Mapping) else None
    if kinds == "string":
        return text
    try:
        return _parse_json(text)
    except (ValueError, RecursionError):
        return {"True": True, "False": False, "None": None}.get(text.strip(), text)


def _properties(schemas: Schemas, name: str) -> Mapping[str, Any]:
    schema = schemas.get(name)
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def _tagged_call(name: str, pairs: Sequence[tuple[str, str]], schemas: Schemas) -> Call:
    properties = _properties(schemas, name)
    arguments = {key: _typed_value(text, properties.get(key) or {}) for key, text in pairs}
    return Call(name, _dump_arguments(arguments))


_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*?)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


def read_function_tags(text: str, schemas: Schemas) -> list[Call]:
    """Read ``<function=NAME><parameter=KEY>VALUE</parameter></function>``."""
    calls: list[Call] = []
    position = 0
    while position < len(text):
        match = _FUNCTION.match(text, position)
        if match is None:
            raise ValueError("no function")
        name, body = match.groups()
        if _PARAMETER.sub("", body).strip():
            raise ValueError("text between parameters")
        calls.append(_tagged_call(name, _PARAMETER.findall(body), schemas))
        position = match.end()
    return calls


_ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


def read_argument_tags(text: str, schemas: Schemas) -> list[Call]:
    """Read ``NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>``."""
    name = text.partition("<arg_key>")[0].strip()
    pairs = [(key.strip(), value) for key, value in _ARGUMENT.findall(text)]
    rest = _ARGUMENT.sub("", text).strip()
    if not re.fullmatch(r"[\w.-]+", name) or rest != name:
        raise ValueError("no name")
    return [_tagged_call(name, pairs, schemas)]


_LITERAL_NAMES = {"true": True, "false": False, "null": None}


def read_python_calls(text: str, schemas: Schemas) -> list[Call]:
    """Read a list of Python calls whose arguments are literals, such as ``[weather(city="Rome")]``."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, MemoryError) as error:
        raise ValueError("not Python") from error
    nodes = tree.elts if isinstance(tree, ast.List | ast.Tuple) else [tree]
    if not nodes:
        raise ValueError("no call")
    return [_read_python_call(node) for node in nodes]


def _read_python_call(node: ast.expr) -> Call:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("not a call with named arguments")
    arguments: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("an argument without a name")
        value = keyword.value
        if isinstance(value, ast.Name) and value.id in _LITERAL_NAMES:
            arguments[keyword.arg] = _LITERAL_NAMES[value.id]
        else:
            arguments[keyword.arg] = ast.literal_eval(value)
    return Call(ast.unparse(node.func), _dump_arguments(arguments))


def read_known_python_calls(text: str, schemas: Schemas) -> list[Call]:
    """Read Python calls without marks, which must name the tools."""
    calls = read_python_calls(text, schemas)
    if any(call.name not in schemas for call in calls):
        raise ValueError("not the name of a tool")
    return calls


_MISTRAL_CALL = re.compile(r"([\w.-]+)(?:\[CALL_ID\](\w+))?(?:\[ARGS\])?\s*(\{.*)", re.DOTALL)


def read_mistral_calls(text: str, schemas: Schemas) -> list[Call]:
    """Read a JSON list, or ``NAME[ARGS]{...}`` of newer models, which repeat the mark for each call."""
    calls: list[Call] = []
    for part in map(str.strip, text.split("[TOOL_CALLS]")):
        if part.startswith(("[", "{")):
            calls += read_json_calls(part, schemas)
            continue
        match = _MISTRAL_CALL.fullmatch(part)
        if match is None:
            raise ValueError("no name")
        name, call_id, arguments = match.groups()
        calls.append(Call(name, _dump_arguments(arguments), call_id))
    return calls


_DEEPSEEK_SEPARATOR = "<\uff5ctool\u2581sep\uff5c>"
_FENCED = re.compile(r"\s*([\w.-]+)\s*```json\s*(.*?)\s*```\s*", re.DOTALL)


def read_deepseek_call(text: str, schemas: Schemas) -> list[Call]:
    """Read ``function<sep>NAME`` with JSON in a fence (V3, R1), or ``NAME<sep>{...}`` (V3.1)."""
    before, separator, rest = text.partition(_DEEPSEEK_SEPARATOR)
    if not separator:
        raise ValueError("no separator")
    match = _FENCED.fullmatch(rest)
    name, arguments = match.groups() if match is not None else (before.strip(), rest)
    if not re.fullmatch(r"[\w.-]+", name):
        raise ValueError("no name")
    return [Call(name, _dump_arguments(arguments))]


_DSML = "\uff5cDSML\uff5c"
_DSML_CALL = re.compile(r'\s*name="([\w.-]+)"\s*>(.*)', re.DOTALL)
_DSML_PARAMETER = re.compile(
    rf'<{_DSML}parameter\s+name="([^"]+)"(?:\s+string="(true|false)")?\s*>(.*?)</{_DSML}parameter>',
    re.DOTALL,
)


def read_dsml_call(text: str, schemas: Schemas) -> list[Call]:
    """Read ``name="NAME">`` and parameters, whose ``string`` says whether a value is a text or JSON (V3.2)."""
    match = _DSML_CALL.fullmatch(text)
    if match is None:
        raise ValueError("no name")
    name, body = match.groups()
    if _DSML_PARAMETER.sub("", body).strip():
        raise ValueError("text between parameters")
    properties = _properties(schemas, name)
    arguments: dict[str, Any] = {}
    for key, is_text, value in _DSML_PARAMETER.findall(body):
        if is_text == "true":
            arguments[key] = value
        elif is_text == "false":
            arguments[key] = _parse_json(value)
        else:
            arguments[key] = _typed_value(value, properties.get(key) or {})
    return [Call(name, _dump_arguments(arguments))]


_KIMI_SEPARATOR = "<|tool_call_argument_begin|>"


def read_kimi_call(text: str, schemas: Schemas) -> list[Call]:
    """Read ``functions.NAME:NUMBER<|tool_call_argument_begin|>{...}``."""
    call_id, separator, arguments = text.partition(_KIMI_SEPARATOR)
    match = re.fullmatch(r"\s*((?:functions\.)?([\w.-]+?)(?::\d+)?)\s*", call_id)
    if not separator or match is None:
        raise ValueError("no name")
    return [Call(match[2], _dump_arguments(arguments), match[1])]


_BARE_KEY = re.compile(r"([{,]\s*)([A-Za-z_][\w.-]*)\s*:")


def _brace_reader(quote: str) -> ReadCalls:
    """Return a reader of ``call:NAME{KEY:VALUE}`` whose texts are between two marks ``quote``."""

    def read(text: str, schemas: Schemas) -> list[Call]:
        match = re.fullmatch(r"\s*call:([\w.-]+)\s*(\{.*\})\s*", text, re.DOTALL)
        if match is None:
            raise ValueError("no name")
        parts = match[2].split(quote)
        quoted = [json.dumps(part) for part in parts[1::2]]
        bare = [_BARE_KEY.sub(r'\1"\2":', part) for part in parts[::2]]
        if len(bare) != len(quoted) + 1:
            raise ValueError("a text without its end")
        joined = "".join(part for pair in zip(bare, [*quoted, ""], strict=True) for part in pair)
        return [Call(match[1], _dump_arguments(joined))]

    return read


_HERMES_FORCED = ForcedCall('<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>")
_JSON_FORCED = ForcedCall('{"name": "NAME", "arguments": ', "}", "[", ", ", "]")

TOOL_FORMATS: tuple[ToolFormat, ...] = (
    ToolFormat(
        "harmony",
        ("<|channel|>",),
        "<|channel|>",
        read_json_calls,  # ``HarmonyReader`` reads the channels
        more_marks=(
            "<|start|>",
            "<|message|>",
            "<|end|>",
            "<|call|>",
            "<|return|>",
            "<|constrain|>",
        ),
        forced=ForcedCall(
            "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>", "", between=""
        ),
    ),
    ToolFormat(
        "kimi_k2",
        ("<|tool_calls_section_begin|>",),
        "<|tool_call_begin|>",
        read_kimi_call,
        "<|tool_call_end|>",
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        more_marks=(_KIMI_SEPARATOR,),
    ),
    ToolFormat(
        "deepseek_v32",
        (_DSML,),
        f"<{_DSML}invoke",
        read_dsml_call,
        f"</{_DSML}invoke>",
        tuple(
            f"<{slash}{_DSML}{name}>"
            for name in ("function_calls", "tool_calls")
            for slash in ("", "/")
        ),
        more_marks=(_DSML,),
    ),
    ToolFormat(
        "deepseek",
        ("<\uff5ctool\u2581call\u2581begin\uff5c>",),
        "<\uff5ctool\u2581call\u2581begin\uff5c>",
        read_deepseek_call,
        "<\uff5ctool\u2581call\u2581end\uff5c>",
        ("<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"),
        more_marks=(_DEEPSEEK_SEPARATOR,),
    ),
    ToolFormat(
        "gemma4",
        ("<|tool_call>",),
        "<|tool_call>",
        _brace_reader('<|"|>'),
        "<tool_call|>",
        more_marks=('<|"|>',),
    ),
    ToolFormat(
        "function_gemma",
        ("<start_function_call>",),
        "<start_function_call>",
        _brace_reader("<escape>"),
        "<end_function_call>",
        more_marks=("<escape>",),
    ),
    ToolFormat(
        "mistral",
        ("[TOOL_CALLS]",),
        "[TOOL_CALLS]",
        read_mistral_calls,
        more_marks=("[ARGS]", "[CALL_ID]"),
        id_pattern="short",
        forced=ForcedCall('{"name": "NAME", "arguments": ', "}", "[TOOL_CALLS][", ", ", "]"),
    ),
    ToolFormat(
        "nemotron_json",
        ("<TOOLCALL>",),
        "<TOOLCALL>",
        read_json_calls,
        "</TOOLCALL>",
        forced=ForcedCall(
            '{"name": "NAME", "arguments": ', "}", "<TOOLCALL>[", ", ", "]</TOOLCALL>"
        ),
    ),
    ToolFormat(
        "phi4_mini", ("<|/tool_call|>",), "<|tool_call|>", read_json_calls, "<|/tool_call|>"
    ),
    ToolFormat("granite", ("<|tool_call|>",), "<|tool_call|>", read_json_calls),
    ToolFormat("glm45", ("<arg_key>",), "<tool_call>", read_argument_tags, "</tool_call>"),
    ToolFormat("qwen3_coder", ("<function=",), "<tool_call>", read_function_tags, "</tool_call>"),
    ToolFormat(
        "hermes",
        ("<tool_call>",),
        "<tool_call>",
        read_json_calls,
        "</tool_call>",
        forced=_HERMES_FORCED,
    ),
    ToolFormat(
        "pythonic",
        ("<|python_start|>", "func_name1("),
        "",
        read_known_python_calls,
        openings="[",
        wrappers=("<|python_start|>", "<|python_end|>"),
    ),
    ToolFormat(
        "llama3_json",
        ("<|python_tag|>", '"parameters": dictionary'),
        "",
        read_known_json_calls,
        openings="{",
        wrappers=("<|python_tag|>",),
        forced=ForcedCall('{"name": "NAME", "parameters": ', "}", between="; "),
    ),
    ToolFormat("json", (), "", read_known_json_calls, openings="{[", forced=_JSON_FORCED),
)
"""All formats; of several whose signs are in a template, the first one counts."""
JSON_FORMAT = TOOL_FORMATS[-1]
FORMAT_NAMES = tuple(tool_format.name for tool_format in TOOL_FORMATS)


@dataclass(frozen=True)
class ReasoningFormat:
    """The marks around reasoning."""

    begin: str
    end: str

    @property
    def marks(self) -> tuple[str, ...]:
        return self.begin, self.end


REASONING_FORMATS = (
    ReasoningFormat("<think>", "</think>"),
    ReasoningFormat("[THINK]", "[/THINK]"),
    ReasoningFormat("<seed:think>", "</seed:think>"),
    ReasoningFormat("<|channel>thought\n", "<channel|>"),
)


def find_tool_format(template: str, name: str | None = None) -> ToolFormat:
    """Return the format of a template, or the one with a name.

    Raises:
        UserError: there is no format of that name.
    """
    if name is not None:
        for tool_format in TOOL_FORMATS:
            if tool_format.name == name:
                return tool_format
        hint = did_you_mean(name, FORMAT_NAMES)
        raise UserError(
            f"tool_parser={name!r} is unknown: use one of {', '.join(FORMAT_NAMES)}{hint}"
        )
    for tool_format in TOOL_FORMATS:
        if any(sign in template for sign in tool_format.signs):
            return tool_format
    return JSON_FORMAT


def find_reasoning_format(template: str) -> ReasoningFormat | None:
    """Return the marks of reasoning that a template mentions, if any."""
    for reasoning_format in REASONING_FORMATS:
        if reasoning_format.end in template:
            return reasoning_format
    return None


def read_calls(tool_format: ToolFormat, text: str, schemas: Schemas) -> list[Call] | None:
    """Return the calls in the text between the marks of a format; None if there are none."""
    if len(text) > _MOST_CHARACTERS:
        return None
    try:
        return tool_format.read(text, schemas)
    except (ValueError, TypeError, RecursionError, OverflowError):
        return None
