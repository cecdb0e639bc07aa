# SPDX-License-Identifier: Apache-2.0
"""Fields of requests. Unknown fields are errors, and so are values that would have no effect."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, model_validator

from megatron.bridge.inference.requests import Sampling
from megatron.bridge.utils.errors import did_you_mean

MOST_CHOICES, MOST_LOGPROBS, MOST_STOPS, LONGEST_STOP, MOST_PROMPTS = 16, 20, 16, 256, 64
MOST_MESSAGES, MOST_CHARACTERS = 1000, 1 << 20

NOT_SUPPORTED = {
    "functions": "functions are not supported: leave it out",
    "function_call": "functions are not supported: leave it out",
    "tools": "tools are not supported: leave it out",
    "tool_choice": "tools are not supported: leave it out",
    "parallel_tool_calls": "tools are not supported: leave it out",
    "audio": "audio is not supported: leave it out",
    "modalities": "only text is generated: leave it out",
    "prediction": "predicted outputs are not supported: leave it out",
    "chat_template": "templates of requests are not used: start the server with --chat-template",
    "guided_json": "grammars are not supported: leave it out",
    "guided_regex": "grammars are not supported: leave it out",
    "suffix": "text cannot be inserted before a suffix: leave it out",
}
"""Fields that other servers support, and what to use instead."""

# fields with the same names in ``Sampling``
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


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class StreamOptions(_Strict):
    include_usage: bool | None = None
    continuous_usage_stats: Literal[False] | None = None


class TextFormat(_Strict):
    """The only supported response format."""

    type: Literal["text"]


class GenerationRequest(_Strict):
    """Fields that both kinds of completion requests share."""

    model: str | None = None
    max_tokens: int | None = Field(None, ge=0, le=1 << 31)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=1 << 31)
    min_p: float | None = Field(None, ge=0, le=1)
    n: int | None = Field(None, ge=1, le=MOST_CHOICES)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    stop: StopText = None
    stop_token_ids: list[int] | None = Field(None, max_length=MOST_STOPS)
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    logit_bias: dict[str, float] | None = Field(None, max_length=1024)
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None

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
        return self

    def sampling(self, **more: Any) -> Sampling:
        """Return the sampling of the request, with OpenAI's defaults."""
        given = {
            **{name: getattr(self, name) for name in _SAMPLING},
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_k": max(self.top_k or 0, 0),
            "stop_ids": self.stop_token_ids,
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


class TextPart(_Strict):
    type: Literal["text"]
    text: Text


def _in_request(url: str) -> str:
    if not url.startswith("data:image/"):
        raise ValueError(
            f"{url[:60]!r} cannot be loaded here: send the image itself, as data:image/png;base64,..."
        )
    return url


class ImageUrl(_Strict):
    """An image inside the request, as a data URL."""

    url: Annotated[Text, AfterValidator(_in_request)]
    detail: Literal["auto"] | None = None


class ImagePart(_Strict):
    type: Literal["image_url"]
    image_url: ImageUrl


class ChatMessage(_Strict):
    role: Text = Field(max_length=64)
    content: Text | list[Annotated[TextPart | ImagePart, Discriminator("type")]]
    name: Text | None = None

    @property
    def characters(self) -> int:
        """Number of characters in the message."""
        if isinstance(self.content, str):
            return len(self.content)
        return sum(len(part.text) for part in self.content if isinstance(part, TextPart))

    def as_record(self) -> dict[str, Any]:
        return self.model_dump(exclude_none=True)


class ChatRequest(GenerationRequest):
    """The body of ``/v1/chat/completions``."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=MOST_MESSAGES)
    max_completion_tokens: int | None = Field(None, ge=0, le=1 << 31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    response_format: TextFormat | None = None

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


class TokenizeRequest(_Strict):
    """The body of ``/tokenize``."""

    model: str | None = None
    prompt: Text | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1, max_length=MOST_MESSAGES)
    add_special_tokens: bool = True
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _check_source(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give one of prompt and messages")
        return self


class DetokenizeRequest(_Strict):
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


def _is_variant(part: Any) -> bool:
    """Return whether a part of pydantic's location is a type of a union instead of a field."""
    return isinstance(part, str) and (
        part in ("str", "int") or part.startswith(("list[", "function-after["))
    )
