# SPDX-License-Identifier: Apache-2.0
"""Requests to the engine, and the results."""

import base64
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

from megatron.bridge.utils.errors import UserError, did_you_mean

if TYPE_CHECKING:
    import numpy as np

FinishReason = Literal["stop", "length", "cancelled", "error", "grammar"]
NOT_FINITE = (
    "the model's logits are not numbers (NaN): look for tensors with NaN or infinite values in its weights or its "
    "adapter, and for overflow in --dtype"
)
"""What the finish reason ``error`` means."""
GRAMMAR_FAILED = "the grammar is too complex to follow while the text is generated: simplify it"
"""What the finish reason ``grammar`` means."""
MOST_CHOICES, MOST_LOGPROBS, MOST_STOPS, LONGEST_STOP = 128, 1000, 64, 1024
MOST_BIAS = 100  # absolute value; it decides between any two logits that models have


@dataclass(frozen=True)
class Sampling:
    """How to continue a prompt; the defaults are greedy."""

    max_new_tokens: int = (
        256  # maximum tokens to generate; 0 only computes log-probabilities of the prompt
    )
    temperature: float = 0.0  # divides the logits; below 1e-6, the most likely token is chosen
    top_k: int = 0  # keep the k most likely tokens; 0 keeps all
    top_p: float = 1.0  # keep the most likely tokens with this total probability
    min_p: float = 0.0  # keep tokens at least this likely, relative to the most likely one
    repetition_penalty: float = (
        1.0  # divides positive logits and multiplies negative logits of tokens in the text
    )
    presence_penalty: float = 0.0  # subtracted from the logits of generated tokens
    frequency_penalty: float = (
        0.0  # subtracted from the logits of generated tokens, once per occurrence
    )
    logit_bias: Mapping[int, float] = field(
        default_factory=dict
    )  # added to the logits of these tokens
    adapter_name: str | None = (
        None  # name of an adapter; None uses the base model or its only adapter
    )
    seed: int | None = None  # reproduces the text in any batch and layout; None draws a random seed
    n: int = 1  # number of completions of the prompt
    stop: Sequence[str] = ()  # end at one of these texts, which the completion does not include
    stop_ids: Sequence[
        int
    ] = ()  # end at one of these tokens, in addition to the model's own end tokens
    ignore_eos: bool = False  # continue after the model's own end tokens
    # special tokens whose text the completion includes, such as marks of tool calls; it leaves out the others
    shown_ids: Sequence[int] = ()
    grammar: str | None = None  # the completion follows this grammar (``grammars`` writes them)
    # return log-probabilities of generated tokens, and of this many most likely tokens at each position
    logprobs: int | None = None
    prompt_logprobs: int | None = None  # the same for the tokens of the prompt after the first
    score_from: int = 1  # index of the first token of the prompt whose log-probability is returned
    priority: int = 0  # of waiting texts, those with the lowest number run first; changes no token
    routed_experts: bool = False  # return the experts that each token was routed to
    # tokens before which the end tokens, ``stop_ids`` and ``stop`` do not end the completion
    min_new_tokens: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        )
        object.__setattr__(self, "stop_ids", tuple(self.stop_ids))
        object.__setattr__(self, "shown_ids", tuple(self.shown_ids))
        for name, (kinds, rule, holds) in _RULES.items():
            value = getattr(self, name)
            if value is None and name in ("seed", "logprobs", "prompt_logprobs", "grammar"):
                continue
            if not isinstance(value, kinds) or isinstance(value, bool) or not holds(value):
                raise UserError(f"{name}={value!r} must be {rule}")
        if not isinstance(self.routed_experts, bool):
            raise UserError(f"routed_experts={self.routed_experts!r} must be true or false")
        if self.min_new_tokens > self.max_new_tokens:
            raise UserError(
                f"min_new_tokens={self.min_new_tokens} is more than max_new_tokens={self.max_new_tokens}: lower it"
            )
        if self.grammar is not None and self.min_new_tokens:
            raise UserError(
                f"min_new_tokens={self.min_new_tokens}: a grammar says where a completion ends: remove one"
            )
        if self.grammar is not None and self.ignore_eos:
            raise UserError("ignore_eos=True: a grammar says where a completion ends: remove one")
        self._check_lists()
        self._check_bias()

    def _check_lists(self) -> None:
        if len(self.stop) > MOST_STOPS:
            raise UserError(f"stop has {len(self.stop)} texts: give at most {MOST_STOPS}")
        for text in self.stop:
            if not isinstance(text, str) or not 0 < len(text) <= LONGEST_STOP:
                raise UserError(
                    f"stop={text!r:.60} must be a text of 1 to {LONGEST_STOP} characters"
                )
        for name in ("stop_ids", "shown_ids"):
            for token in getattr(self, name):
                if not isinstance(token, int):
                    raise UserError(f"{name}={token!r} must be a token id: put texts into stop")

    def _check_bias(self) -> None:
        for token, bias in self.logit_bias.items():
            if not isinstance(token, int) or not isinstance(bias, int | float):
                raise UserError(f"logit_bias[{token!r}]={bias!r} must be a number for a token id")
            if not -MOST_BIAS <= bias <= MOST_BIAS:
                raise UserError(
                    f"logit_bias[{token}]={bias!r} must be from -{MOST_BIAS} to {MOST_BIAS}"
                )

    @property
    def is_greedy(self) -> bool:
        return self.temperature < 1e-6

    @property
    def is_plain(self) -> bool:
        """Whether the next token is the one with the highest logit."""
        return self.is_greedy and not self.changes_logits and self.grammar is None

    @property
    def changes_logits(self) -> bool:
        """Whether penalties or biases change the logits."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (
            1.0,
            0.0,
            0.0,
        )
        return penalties or bool(self.logit_bias)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], location: str = "") -> "Sampling":
        """Create a sampling from fields; the message of a ``UserError`` begins with ``location``."""
        names = [field_info.name for field_info in fields(cls)]
        for name in values:
            if name not in names:
                raise UserError(
                    f"{location}{name} is not a sampling parameter{did_you_mean(name, names)}"
                )
        try:
            return cls(**values)
        except UserError as error:
            raise UserError(f"{location}{error}") from error


def _at_least(low: float) -> Any:
    return lambda value: low <= value < math.inf


_NUMBER = (int, float)
_PENALTY = (_NUMBER, "a number from -2 to 2", lambda value: -2 <= value <= 2)
_RULES: dict[str, tuple[Any, str, Any]] = {
    "max_new_tokens": (int, "a number of at least 0", _at_least(0)),
    "min_new_tokens": (int, "a number of at least 0", _at_least(0)),
    "temperature": (_NUMBER, "a number of at least 0: 0 is greedy", _at_least(0)),
    "top_k": (int, "a number of at least 0: 0 keeps all tokens", _at_least(0)),
    "top_p": (
        _NUMBER,
        "from 0 to 1: 1 keeps all tokens, 0 the most likely one",
        lambda value: 0 <= value <= 1,
    ),
    "min_p": (_NUMBER, "from 0 to 1: 0 keeps all tokens", lambda value: 0 <= value <= 1),
    "repetition_penalty": (
        _NUMBER,
        "above 0: 1 changes nothing",
        lambda value: 0 < value < math.inf,
    ),
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "logit_bias": (Mapping, "a mapping of token ids to numbers", lambda _: True),
    "grammar": (str, "a grammar in the notation of Lark", lambda value: bool(value.strip())),
    "seed": (int, "a whole number", lambda _: True),
    "priority": (int, "a whole number: the lowest runs first", lambda _: True),
    "n": (int, f"from 1 to {MOST_CHOICES}", lambda value: 1 <= value <= MOST_CHOICES),
    "logprobs": (int, f"from 0 to {MOST_LOGPROBS}", lambda value: 0 <= value <= MOST_LOGPROBS),
    "score_from": (int, "a number of at least 1", _at_least(1)),
    "prompt_logprobs": (
        int,
        f"from 0 to {MOST_LOGPROBS}",
        lambda value: 0 <= value <= MOST_LOGPROBS,
    ),
}


@dataclass(frozen=True)
class TokenLogprob:
    """The model's log-probability of a token, before temperature and other changes."""

    token: int
    logprob: float
    is_most_likely: bool
    top: dict[int, float] = field(default_factory=dict)  # the most likely tokens, best first


@dataclass
class Completion:
    prompt_tokens: list[int]
    tokens: list[int] = field(
        default_factory=list
    )  # generated tokens, including the token that ended the text
    text: str = ""  # text without special tokens, up to a stop text
    finish_reason: FinishReason | None = (
        None  # ``stop`` at a stop text or end token, ``length`` at ``max_new_tokens``, ``error`` for NaN,
        # ``grammar`` if the grammar is too complex
    )
    seed: int = 0
    choice: int = 0  # index among the ``n`` completions of the prompt
    logprobs: list[TokenLogprob] = field(default_factory=list)  # of ``tokens``, if requested
    prompt_logprobs: list[TokenLogprob] = field(
        default_factory=list
    )  # from the second token on, if requested
    weight_versions: list[int] = field(
        default_factory=list
    )  # number of weight updates before each of ``tokens``
    # tokens of the prompt that were not computed again; equal completions may differ in it
    cached_tokens: int = field(default=0, compare=False)
    # where in the text each of ``tokens`` begins; an end token has no text
    text_offsets: list[int] = field(default_factory=list)
    visible_tokens: int = 0  # number of ``tokens`` before a stop text
    message: dict[str, Any] | None = None
    """The answer to a conversation in OpenAI's form, with ``content``, ``reasoning_content`` and
    ``tool_calls``; None for other prompts."""
    # experts of each computed token, if requested: integers [tokens of prompt and completion - 1, layers with
    # experts, experts per token]; the last token has not been computed, and a cancelled text may have fewer rows
    routed_experts: "np.ndarray[Any, Any] | None" = field(default=None, compare=False)


def encode_experts(experts: "np.ndarray[Any, Any]") -> str:
    """Return experts as vLLM sends them: the base64 text of a ``.npy`` file."""
    import numpy as np

    file = io.BytesIO()
    np.save(file, experts, allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode()
