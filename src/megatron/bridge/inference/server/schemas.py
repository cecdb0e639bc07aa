# SPDX-License-Identifier: Apache-2.0
"""Fields of requests.

Unknown fields are errors, and so are values that would have no effect on the answer although they ask for one. Fields
that other servers take and that change no token by their nature, such as ``user``, are accepted.
"""

from collections.abc import Collection, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, model_validator

from megatron.bridge.inference.conversations.options import (
    MOST_TOOLS,
    ConversationOptions,
    Strict,
    StructuredAnswer,
    Text,
    Tool,
    describe,
)
from megatron.bridge.inference.requests import MOST_BIAS, Sampling
from megatron.bridge.inference.server.errors import ApiError
from megatron.bridge.utils.errors import UserError

MOST_CHOICES, MOST_LOGPROBS, MOST_STOPS, LONGEST_STOP, MOST_PROMPTS = 16, 20, 16, 256, 64
MOST_MESSAGES, MOST_CHARACTERS = 1000, 1 << 20

NOT_SUPPORTED = {
    "functions": "functions are the older form of tools: use tools",
    "function_call": "functions are the older form of tools: use tool_choice",
    "audio": "no audio is generated: leave it out",
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
# fields with the same names in ``Sampling``
_SAMPLING = ("top_p", "min_p", "n", "seed", "stop", "ignore_eos", "priority", *_PENALTIES)


StopText = Text | list[Text] | None


class StreamOptions(Strict):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # OpenAI pads events with it; it changes no token
    continuous_usage_stats: Literal[False] | None = None


class GenerationRequest(StructuredAnswer):
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
    priority: int | None = Field(None, ge=-(1 << 31), lt=1 << 31)
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prediction: dict[str, Any] | None = None

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

    @model_validator(mode="after")
    def _check_end(self) -> "GenerationRequest":
        for name in ("ignore_eos", "min_tokens"):
            if self.structures() and getattr(self, name):
                raise ValueError(f"{name}: the format of the answer says where it ends: remove one")
        return self

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


def _audio_in_request(url: str) -> str:
    if not url.startswith("data:audio/"):
        raise ValueError(
            f"{url[:60]!r} cannot be loaded here: send the audio itself, as data:audio/wav;base64,..."
        )
    return url


class InputAudio(Strict):
    """A recording inside the request."""

    data: Text  # the file in base64
    format: Literal["wav", "mp3", "flac", "ogg", "opus"]


class AudioPart(Strict):
    type: Literal["input_audio"]
    input_audio: InputAudio


class AudioUrl(Strict):
    """A recording inside the request, as a data URL."""

    url: Annotated[Text, AfterValidator(_audio_in_request)]


class AudioUrlPart(Strict):
    type: Literal["audio_url"]
    audio_url: AudioUrl


ContentPart = Annotated[TextPart | ImagePart | AudioPart | AudioUrlPart, Discriminator("type")]


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
    content: Text | list[ContentPart] | None = None
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


class ChatRequest(GenerationRequest, ConversationOptions):
    """The body of ``/v1/chat/completions``."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=MOST_MESSAGES)
    max_completion_tokens: int | None = Field(None, ge=0, le=1 << 31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
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
        return self


class TokenizeRequest(Strict):
    """The body of ``/tokenize``."""

    model: str | None = None
    prompt: Text | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1, max_length=MOST_MESSAGES)
    tools: list[Tool] | None = Field(None, max_length=MOST_TOOLS)
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


def refusal_of_fields(errors: Sequence[Any], names: Collection[str]) -> ApiError:
    """Return the error response for a body that pydantic refuses.

    Args:
        errors: The errors of a ``ValidationError``.
        names: Names of the fields of the body, for suggestions.
    """
    # the most specific error of a union's variants
    deepest = max(errors, key=lambda item: len(item["loc"]))
    message, field = describe(deepest, names, NOT_SUPPORTED)
    return ApiError(400, message, field)


def _is_default(name: str, value: Any) -> bool:
    """Return whether a field that is not supported asks for nothing."""
    if name not in NOT_SUPPORTED:
        return False
    return value is None or value in _DEFAULT_VALUES.get(name, ())
