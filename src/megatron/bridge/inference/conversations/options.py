# SPDX-License-Identifier: Apache-2.0
"""What a request can ask of an answer: tools, reasoning and structure, in OpenAI's and vLLM's form.

Unknown fields are errors.
"""

import json
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from megatron.bridge.inference.grammars import (
    choice_grammar,
    json_grammar,
    regex_grammar,
    written_grammar,
)
from megatron.bridge.utils.errors import UserError, did_you_mean

MOST_TOOLS = 128


def _check_encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            "the text has a surrogate without its pair, which is not a character: remove it"
        ) from error
    return text


Text = Annotated[str, AfterValidator(_check_encodable)]


class Strict(BaseModel):
    """A part of a request, in which unknown fields are errors."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class JsonSchema(Strict):
    """OpenAI's description of a structured answer; each schema is followed, whatever ``strict`` is."""

    name: Text | None = None
    description: Text | None = None
    content: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """OpenAI's form of a structured answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema belongs to type=json_schema: give both")
        return self

    def grammar(self) -> str | None:
        """Return the grammar of the answer; None for any text."""
        if self.json_schema is not None:
            return json_grammar(self.json_schema.content)
        return json_grammar({"type": "object"}) if self.type == "json_object" else None


class StructuredOutputs(Strict):
    """vLLM's form of a structured answer."""

    content: dict[str, Any] | Text | None = Field(None, alias="json")
    regex: Text | None = Field(None, min_length=1)
    choice: list[Text] | None = Field(None, min_length=1, max_length=1024)
    grammar_text: Text | None = Field(None, min_length=1, alias="grammar")
    json_object: bool | None = None

    @model_validator(mode="after")
    def _check_one(self) -> "StructuredOutputs":
        given = self.model_dump(exclude_none=True, by_alias=True)
        if len(given) != 1 or given == {"json_object": False}:
            raise ValueError("give one of json, regex, choice, grammar and json_object=true")
        self.parsed_schema()
        return self

    def parsed_schema(self) -> Any:
        """Return the JSON schema, which may be a text."""
        if not isinstance(self.content, str):
            return self.content
        schema = json.loads(self.content)
        if not isinstance(schema, dict | bool):
            raise ValueError("json must be a JSON schema")
        return schema

    def grammar(self) -> str:
        """Return the grammar of the answer."""
        if self.content is not None:
            return json_grammar(self.parsed_schema())
        if self.regex is not None:
            return regex_grammar(self.regex)
        if self.choice is not None:
            return choice_grammar(self.choice)
        if self.grammar_text is not None:
            return written_grammar(self.grammar_text)
        return json_grammar({"type": "object"})


class StructuredAnswer(Strict):
    """Fields that say what form an answer has."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | Text | None = None
    guided_regex: Text | None = None
    guided_choice: list[Text] | None = None
    guided_grammar: Text | None = None

    def structures(self) -> list[ResponseFormat | StructuredOutputs]:
        """Return all forms of a structured answer that the request asks for."""
        structures: list[ResponseFormat | StructuredOutputs] = []
        if self.response_format is not None and self.response_format.type != "text":
            structures.append(self.response_format)
        if self.structured_outputs is not None:
            structures.append(self.structured_outputs)
        for name in ("json", "regex", "choice", "grammar"):
            value = getattr(self, f"guided_{name}")
            if value is not None:
                structures.append(StructuredOutputs.model_validate({name: value}))
        return structures

    @model_validator(mode="after")
    def _check_structures(self) -> "StructuredAnswer":
        if len(self.structures()) > 1:
            raise ValueError(
                "give one of response_format, structured_outputs and the fields guided_..."
            )
        return self

    def grammar(self) -> str | None:
        """Return the grammar of the answer; None for any text."""
        structures = self.structures()
        return structures[0].grammar() if structures else None


class ToolFunction(Strict):
    """The function that a tool describes."""

    name: Text = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    description: Text | None = None
    parameters: dict[str, Any] | None = None  # JSON schema
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: ToolFunction

    def as_record(self) -> dict[str, Any]:
        """Return the tool as chat templates expect it: what the client has sent."""
        function = self.function.model_dump(exclude_unset=True, exclude={"strict"})
        return {"type": "function", "function": function}


class FunctionName(Strict):
    name: Text


class NamedTool(Strict):
    """The choice of a tool that must be called."""

    type: Literal["function"]
    function: FunctionName


class ConversationOptions(StructuredAnswer):
    """Fields of a conversation that say how its answer is made."""

    tools: list[Tool] | None = Field(None, max_length=MOST_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        None
    )
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_tool_choice(self) -> "ConversationOptions":
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise ValueError("tools has two functions of one name: names must differ")
        if isinstance(self.tool_choice, NamedTool):
            chosen = self.tool_choice.function.name
            if chosen not in names:
                hint = did_you_mean(chosen, names)
                raise ValueError(f"tool_choice: {chosen!r:.70} is not in tools{hint}")
        elif self.tool_choice == "required" and not names:
            raise ValueError("tool_choice=required needs tools: give at least one")
        if self.structures() and self.tool_choice not in (None, "none", "auto"):
            raise ValueError("tool_choice demands a call and the format another text: give one")
        return self

    @property
    def offered_tools(self) -> list[Tool]:
        """The tools that the model may call."""
        return [] if self.tool_choice == "none" else self.tools or []


OPTION_NAMES = tuple(ConversationOptions.model_fields)


def read_options(values: Mapping[str, Any]) -> ConversationOptions:
    """Check the options of a conversation.

    Raises:
        UserError: A field is unknown or has a wrong value.
    """
    try:
        return ConversationOptions.model_validate(dict(values))
    except ValidationError as error:
        # the most specific error of a union's variants
        deepest = max(error.errors(), key=lambda item: len(item["loc"]))
        raise UserError(describe(deepest, OPTION_NAMES)[0]) from error


def describe(
    error: Mapping[str, Any], names: Collection[str], not_supported: Mapping[str, str] | None = None
) -> tuple[str, str | None]:
    """Return a message for a pydantic error, and its field.

    Args:
        error: One of the errors of a ``ValidationError``.
        names: Valid names of fields, for suggestions.
        not_supported: What to use instead of fields that other programs support.
    """
    path = [str(part) for part in error["loc"] if part != "body" and not _is_variant(part)]
    field = ".".join(path)[:100] or None
    if error["type"] == "extra_forbidden":
        hint = (not_supported or {}).get(field or "")
        if hint is not None:
            return f"{field}: {hint}", field
        return f"{field} is not a field of this request{did_you_mean(path[-1], names)}", field
    message = str(error["msg"]).removeprefix("Value error, ")
    return (message if field is None else f"{field}: {message}"), field


def _is_variant(part: Any) -> bool:
    """Return whether a part of pydantic's location is a type of a union instead of a field."""
    return isinstance(part, str) and (
        part in ("str", "int") or part.startswith(("list[", "function-after["))
    )
