# SPDX-License-Identifier: Apache-2.0
"""Response objects of OpenAI's endpoints: complete, or as a stream of chunks."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from megatron.bridge.inference.requests import TokenLogprob
from megatron.bridge.inference.server.engine_loop import Progress

Json = dict[str, Any]


class TokenTexts:
    """The texts of single tokens, cached."""

    def __init__(self, hf: Any) -> None:
        self.of = lru_cache(maxsize=65536)(
            lambda token: str(hf.decode([token], skip_special_tokens=False))
        )


@dataclass
class Choice:
    """One choice of a response and its tokens so far."""

    index: int  # index in the response
    prompt: list[int]  # token ids of its prompt
    echoed: str | None = None  # text of the prompt if the response begins with it
    text: str = ""
    tokens: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, progress: Progress) -> None:
        self.text += progress.piece
        self.tokens += len(progress.tokens)
        self.logprobs += progress.logprobs
        self.prompt_logprobs += progress.prompt_logprobs
        self.finish_reason = progress.finish_reason


def usage(prompts: Sequence[Sequence[int]], choices: Sequence[Choice]) -> Json:
    prompt, completion = sum(map(len, prompts)), sum(choice.tokens for choice in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


@dataclass
class CompletionFormat:
    """Response format of ``/v1/completions``."""

    kind = "text_completion"
    chunk_kind = "text_completion"

    texts: TokenTexts  # texts of single tokens
    top: int | None = None  # number of most likely tokens to return; None for no log-probabilities
    _offsets: dict[int, int] = field(default_factory=dict)

    def whole(self, choice: Choice) -> Json:
        text = (choice.echoed or "") + choice.text
        return self._choice(choice, text, choice.logprobs, choice.echoed is not None)

    def first_pieces(self, choice: Choice) -> list[Json]:
        """Return the chunks that start the stream of a choice."""
        return (
            []
            if choice.echoed is None
            else [self._choice(choice, choice.echoed, [], True, over=False)]
        )

    def piece(self, choice: Choice, progress: Progress) -> Json:
        return self._choice(choice, progress.piece, progress.logprobs, False)

    def _choice(
        self,
        choice: Choice,
        text: str,
        logprobs: Sequence[TokenLogprob],
        echo: bool,
        over: bool = True,
    ) -> Json:
        found = None if self.top is None else self._logprobs(choice, logprobs, echo)
        reason = choice.finish_reason if over else None
        return {"index": choice.index, "text": text, "logprobs": found, "finish_reason": reason}

    def _logprobs(self, choice: Choice, logprobs: Sequence[TokenLogprob], echo: bool) -> Json:
        found: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        if echo:
            self._append(found, choice, choice.prompt[0], None)
            for one in choice.prompt_logprobs:
                self._append(found, choice, one.token, one)
        for one in logprobs:
            self._append(found, choice, one.token, one)
        return found

    def _append(self, found: Json, choice: Choice, token: int, one: TokenLogprob | None) -> None:
        text = self.texts.of(token)
        start = self._offsets.get(choice.index, 0)
        self._offsets[choice.index] = start + len(text)
        found["tokens"].append(text)
        found["text_offset"].append(start)
        found["token_logprobs"].append(None if one is None else one.logprob)
        found["top_logprobs"].append(None if one is None or not self.top else self._top(one))

    def _top(self, one: TokenLogprob) -> Json:
        """Return log-probabilities by text; of tokens with the same text, the most likely one."""
        ranked = {**one.top, **({one.token: one.logprob} if one.token not in one.top else {})}
        named: Json = {}
        for token, logprob in ranked.items():
            named.setdefault(self.texts.of(token), logprob)
        return named


@dataclass
class ChatFormat:
    """Response format of ``/v1/chat/completions``; the attributes are those of ``CompletionFormat``."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    texts: TokenTexts
    top: int | None = None

    def whole(self, choice: Choice) -> Json:
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        return self._choice(choice, "message", message, choice.logprobs)

    def first_pieces(self, choice: Choice) -> list[Json]:
        delta = {"role": "assistant", "content": ""}
        return [{"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}]

    def piece(self, choice: Choice, progress: Progress) -> Json:
        delta = {"content": progress.piece} if progress.piece else {}
        return self._choice(choice, "delta", delta, progress.logprobs)

    def _choice(
        self, choice: Choice, name: str, value: Json, logprobs: Sequence[TokenLogprob]
    ) -> Json:
        content = (
            None if self.top is None else {"content": [self._logprob(one) for one in logprobs]}
        )
        return {
            "index": choice.index,
            name: value,
            "logprobs": content,
            "finish_reason": choice.finish_reason,
        }

    def _logprob(self, one: TokenLogprob) -> Json:
        top = [self._token(token, logprob) for token, logprob in list(one.top.items())[: self.top]]
        return {**self._token(one.token, one.logprob), "top_logprobs": top}

    def _token(self, token: int, logprob: float) -> Json:
        text = self.texts.of(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


Format = CompletionFormat | ChatFormat
