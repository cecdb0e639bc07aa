# SPDX-License-Identifier: Apache-2.0
"""Fields of requests.

Unknown fields are errors, and so are values that would have no effect on the answer although they ask for one. Fields
that other servers take and that change no token by their nature, such as ``user``, are accepted.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    model_validator,
)

from megatron.bridge.inference.grammars import (
    choice_grammar,
    json_grammar,
    regex_grammar,
    written_grammar,
)
from megatron.bridge.inference.requests import MOST_BIAS, Sampling
from megatron.bridge.utils.errors import UserError, did_you_mean

MOST_CHOICES, MOST_LOGPROBS, MOST_STOPS, LONGEST_STOP, MOST_PROMPTS = 16, 20, 16, 256, 64
MOST_MESSAGES, MOST_CHARACTERS = 1000, 1 << 20

NOT_SUPPORTED = {
    "functions": "functions are the older form of tools: use tools",
    "function_call": "functions are the older form of tools: use tool_choice",
    "audio": "audio is not supported: leave it out",
    "modalities": "only text is generated: leave it out",
    "web_search_options": "the server searches nothing: leave it out",
    "verbosity": "no open model reads it: ask for it in a message",
    "length_penalty": "beams are not supported: leave it out",
    "early_stopping": "beams are not supported: leave it out",
    "use_beam_search": "beams are not supported: leave it out",
    "spaces_between_special_tokens": "the tokenizer decides it: leave it out",
    "chat_template": "templates of requests are not used: start the server with --chat-template",
    "suffix": "text cannot be inserted before a suffix: leave it out",
}
"""Fields that other servers support, and what to use instead."""

# fields with the same names in ``Sampling``
_MOST_TOOLS = 128
_DEFAULT_VALUES: dict[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "length_penalty": (1, 1.0),
    "early_stopping": (False,),
    "use_beam_search": (False,),
    "spaces_between_special_tokens": (True,),
    "verbosity": ("medium",),
}
"""Fields without support, and the values by which a client asks for what the server does anyway."""
_PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")
_SAMPLING = ("top_p", "min_p", "n", "seed", "stop", "ignore_eos", *_PENALTIES)


def _check_encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            "the text has a surrogate without its pair, which is not a character: remove it"
        ) from error
    return text


Text = Annotated[str, AfterValidator(_check_encodable)]
StopText = Text | list[Text] | None


class Strict(BaseModel):
    """A part of a request, in which unknown fields are errors."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class StreamOptions(Strict):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # OpenAI pads events with it; it changes no token
    continuous_usage_stats: Literal[False] | None = None


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


class GenerationRequest(Strict):
    """Fields that both kinds of completion requests share."""

    model: str | None = None
    max_tokens: int | None = Field(None, ge=0, le=1 << 31)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=1 << 31)
    min_p: float | None = Field(None, ge=0, le=1)
    n: int | None = Field(None, ge=1, le=MOST_CHOICES)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    stop: StopText = None
    min_tokens: int | None = Field(None, ge=0, le=1 << 31)
    stop_token_ids: list[int] | None = Field(None, max_length=MOST_STOPS)
    ignore_eos: bool | None = None
    return_routed_experts: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    logit_bias: dict[str, float] | None = Field(None, max_length=1024)
    # these change no token
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prediction: dict[str, Any] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | Text | None = None
    guided_regex: Text | None = None
    guided_choice: list[Text] | None = None
    guided_grammar: Text | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_default_values(cls, body: Any) -> Any:
        """Drop fields that are not supported and have the value that leaves the answer as it is."""
        if not isinstance(body, dict):
            return body
        return {
            name: value
            for name, value in body.items()
            if name in cls.model_fields or not _is_default(name, value)
        }

    @model_validator(mode="after")
    def _check(self) -> "GenerationRequest":
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stops) > MOST_STOPS or any(not 0 < len(text) <= LONGEST_STOP for text in stops):
            raise ValueError(
                f"stop may be up to {MOST_STOPS} texts of 1 to {LONGEST_STOP} characters"
            )
        if self.stream_options is not None and not self.stream:
            raise ValueError(
                "stream_options needs stream=true: set it, or leave stream_options out"
            )
        bad = [
            key
            for key in self.logit_bias or ()
            if not (key.isascii() and key.isdecimal() and len(key) < 12)
        ]
        if bad:
            raise ValueError(f"logit_bias[{bad[0]!r:.40}] must be a token id in decimal digits")
        for token, bias in (self.logit_bias or {}).items():
            if not -MOST_BIAS <= bias <= MOST_BIAS:
                raise ValueError(
                    f"logit_bias[{token}]={bias} must be from -{MOST_BIAS} to {MOST_BIAS}"
                )
        return self

    def _structures(self) -> list[ResponseFormat | StructuredOutputs]:
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
    def _check_structures(self) -> "GenerationRequest":
        structures = self._structures()
        if len(structures) > 1:
            raise ValueError(
                "give one of response_format, structured_outputs and the fields guided_..."
            )
        for name in ("ignore_eos", "min_tokens"):
            if structures and getattr(self, name):
                raise ValueError(f"{name}: the format of the answer says where it ends: remove one")
        return self

    def grammar(self) -> str | None:
        """Return the grammar of the answer; None for any text."""
        structures = self._structures()
        return structures[0].grammar() if structures else None

    def sampling(self, **more: Any) -> Sampling:
        """Return the sampling of the request, with OpenAI's defaults.

        Args:
            **more: Further values of ``Sampling``, with ``max_new_tokens``.

        Raises:
            UserError: ``min_tokens`` is more than that.
        """
        if self.min_tokens is not None and self.min_tokens > more["max_new_tokens"]:
            raise UserError(
                f"min_tokens={self.min_tokens} is more than max_tokens={more['max_new_tokens']}: lower it"
            )
        given = {
            **{name: getattr(self, name) for name in _SAMPLING},
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_k": max(self.top_k or 0, 0),
            "stop_ids": self.stop_token_ids,
            "min_new_tokens": self.min_tokens,
            "routed_experts": self.return_routed_experts,
            "logit_bias": {int(key): value for key, value in (self.logit_bias or {}).items()},
        }
        return Sampling(
            **{name: value for name, value in {**given, **more}.items() if value is not None}
        )

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with token counts."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class CompletionRequest(GenerationRequest):
    """The body of ``/v1/completions``."""

    prompt: Text | list[int] | list[Text] | list[list[int]]
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    echo: bool | None = None
    best_of: int | None = None

    @model_validator(mode="after")
    def _check_prompts(self) -> "CompletionRequest":
        if not self.prompt:
            raise ValueError("prompt is empty: give a text or token ids")
        if isinstance(self.prompt, list) and not isinstance(self.prompt[0], int):
            if len(self.prompt) > MOST_PROMPTS:
                raise ValueError(
                    f"prompt has {len(self.prompt)} texts: send at most {MOST_PROMPTS} at a time"
                )
            if not all(self.prompt):
                raise ValueError(
                    "prompt has an empty text: give at least one character or token each"
                )
        if self.best_of not in (None, self.n or 1):
            raise ValueError("best_of must be n or left out: choices are not ranked")
        if self.echo and self.stream and self.logprobs is not None and (self.n or 1) > 1:
            raise ValueError(
                "echo with stream, logprobs and n > 1 is not supported: leave out one of them"
            )
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return list(self.prompt)  # type: ignore[arg-type]


class TextPart(Strict):
    type: Literal["text"]
    text: Text


def _in_request(url: str) -> str:
    if not url.startswith("data:image/"):
        raise ValueError(
            f"{url[:60]!r} cannot be loaded here: send the image itself, as data:image/png;base64,..."
        )
    return url


class ImageUrl(Strict):
    """An image inside the request, as a data URL."""

    url: Annotated[Text, AfterValidator(_in_request)]
    # OpenAI's own models see more or fewer pixels by it; here the processor of the model decides
    detail: Literal["auto", "low", "high"] | None = None


class ImagePart(Strict):
    type: Literal["image_url"]
    image_url: ImageUrl


class FunctionCall(Strict):
    name: Text = Field(min_length=1, max_length=256)
    arguments: Text  # a JSON object


class ToolCall(Strict):
    """A call in an earlier answer."""

    id: Text | None = None
    type: Literal["function"] | None = None
    function: FunctionCall
    index: int | None = None  # clients that join the deltas of a stream keep it


def _check_nothing(value: Any) -> Any:
    if value:
        raise ValueError("cannot be given to the model: put text into content")
    return value


Nothing = Annotated[Any, AfterValidator(_check_nothing)]
"""A field of OpenAI's answers that is empty in every answer of this server."""


class ChatMessage(Strict):
    """A message of a conversation; an answer of the server, as its clients dump it, is one."""

    role: Text = Field(max_length=64)
    content: Text | list[Annotated[TextPart | ImagePart, Discriminator("type")]] | None = None
    name: Text | None = None
    reasoning_content: Text | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: Text | None = None
    # fields of OpenAI's answers
    refusal: Nothing = None
    audio: Nothing = None
    function_call: Nothing = None
    annotations: Nothing = None

    @model_validator(mode="after")
    def _check_content(self) -> "ChatMessage":
        if self.content is None and self.role != "assistant":
            raise ValueError(f"content of the role {self.role} is missing: give a text")
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"tool_calls belong to the role assistant, not {self.role}")
        return self

    @property
    def characters(self) -> int:
        """Number of characters in the message."""
        calls = self.tool_calls or []
        size = sum(len(call.function.name) + len(call.function.arguments) for call in calls)
        size += len(self.reasoning_content or "")
        if isinstance(self.content, list):
            texts = [part.text for part in self.content if isinstance(part, TextPart)]
            return size + sum(map(len, texts))
        return size + len(self.content or "")

    def as_record(self) -> dict[str, Any]:
        """Return the message in the format of training records."""
        record = self.model_dump(
            exclude_none=True, exclude={"refusal", "audio", "function_call", "annotations"}
        )
        for call in record.get("tool_calls", ()):
            call.pop("index", None)
        if not record.get("tool_calls"):
            record.pop("tool_calls", None)
        record.setdefault("content", "")
        return record


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


def _check_beginning(messages: list[ChatMessage], add_generation_prompt: bool | None) -> None:
    """Refuse conversations whose last message is not the beginning of an answer."""
    if add_generation_prompt:
        raise ValueError(
            "continue_final_message and add_generation_prompt exclude each other: leave out the second"
        )
    last = messages[-1]
    if last.role != "assistant" or not last.content or last.tool_calls:
        raise ValueError(
            "continue_final_message: the last message must be of the assistant, with content and without calls"
        )


class ChatRequest(GenerationRequest):
    """The body of ``/v1/chat/completions``."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=MOST_MESSAGES)
    max_completion_tokens: int | None = Field(None, ge=0, le=1 << 31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    tools: list[Tool] | None = Field(None, max_length=_MOST_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        None
    )
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @model_validator(mode="after")
    def _check_continuation(self) -> "ChatRequest":
        if self.continue_final_message:
            _check_beginning(self.messages, self.add_generation_prompt)
        elif self.add_generation_prompt is False:
            raise ValueError(
                "add_generation_prompt=false asks for no answer: leave it out, or set continue_final_message"
            )
        return self

    @model_validator(mode="after")
    def _check_chat(self) -> "ChatRequest":
        if sum(message.characters for message in self.messages) > MOST_CHARACTERS:
            raise ValueError(
                f"messages have more than {MOST_CHARACTERS} characters of text: shorten them"
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs=true: set it, or leave top_logprobs out")
        limits = (self.max_tokens, self.max_completion_tokens)
        if None not in limits and limits[0] != limits[1]:
            raise ValueError("max_tokens and max_completion_tokens differ: give one of them")
        self._check_tool_choice()
        return self

    def _check_tool_choice(self) -> None:
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
        if self._structures() and self.tool_choice not in (None, "none", "auto"):
            raise ValueError("tool_choice demands a call and the format another text: give one")

    @property
    def offered_tools(self) -> list[Tool]:
        """The tools that the model may call."""
        return [] if self.tool_choice == "none" else self.tools or []


class TokenizeRequest(Strict):
    """The body of ``/tokenize``."""

    model: str | None = None
    prompt: Text | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1, max_length=MOST_MESSAGES)
    tools: list[Tool] | None = Field(None, max_length=_MOST_TOOLS)
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _check_source(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give one of prompt and messages")
        if self.continue_final_message:
            if self.messages is None:
                raise ValueError("continue_final_message needs messages: leave it out")
            _check_beginning(self.messages, self.add_generation_prompt)
        elif self.add_generation_prompt is False:
            raise ValueError(
                "add_generation_prompt=false: prompts for no answer are not made here: leave it out"
            )
        return self


class DetokenizeRequest(Strict):
    """The body of ``/detokenize``."""

    model: str | None = None
    tokens: list[int]


def describe(error: Mapping[str, Any], names: list[str]) -> tuple[str, str | None]:
    """Return a message for a pydantic error, and its field if it is one of ``names``."""
    path = [str(part) for part in error["loc"] if part != "body" and not _is_variant(part)]
    field = ".".join(path)[:100] or None
    if error["type"] == "extra_forbidden":
        if field in NOT_SUPPORTED:
            return f"{field}: {NOT_SUPPORTED[field]}", field
        return f"{field} is not a field of this request{did_you_mean(path[-1], names)}", field
    message = str(error["msg"]).removeprefix("Value error, ")
    return (message if field is None else f"{field}: {message}"), field


def _is_default(name: str, value: Any) -> bool:
    """Return whether a field that is not supported asks for nothing."""
    if name not in NOT_SUPPORTED:
        return False
    return value is None or value in _DEFAULT_VALUES.get(name, ())


def _is_variant(part: Any) -> bool:
    """Return whether a part of pydantic's location is a type of a union instead of a field."""
    return isinstance(part, str) and (
        part in ("str", "int") or part.startswith(("list[", "function-after["))
    )
