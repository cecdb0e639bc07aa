# SPDX-License-Identifier: Apache-2.0
"""Response objects of OpenAI's endpoints: complete, or as a stream of chunks."""

import codecs
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from megatron.bridge.inference.conversations.answer_messages import MessageWriter
from megatron.bridge.inference.conversations.answer_reader import AnswerFormat
from megatron.bridge.inference.requests import TokenLogprob
from megatron.bridge.inference.server.engine_loop import ChoiceProgress

Json = dict[str, Any]


class TokenTexts:
    """The texts and bytes of single tokens, cached."""

    def __init__(self, hf: Any) -> None:
        self._hf = hf
        self._added = hf.added_tokens_decoder  # this property builds a dict in each call
        self._byte_level = _is_byte_level(hf)
        self.of = lru_cache(maxsize=65536)(self._text)
        self.bytes_of = lru_cache(maxsize=65536)(self._bytes)

    def special_text(self, token: int) -> str | None:
        """Return the text of a special token, which answers leave out; None for other tokens."""
        added = self._added.get(token)
        return added.content if added is not None and added.special else None

    def _text(self, token: int) -> str:
        return str(self._hf.decode([token], skip_special_tokens=False))

    def _bytes(self, token: int, is_first: bool) -> bytes:
        """Return what a token adds to an answer: part of a character, or nothing for a special token.

        SentencePiece tokenizers leave out the space before the first word of an answer.
        """
        if self.special_text(token) is not None:
            return b""
        text = self._text(token)
        piece = str(self._hf.convert_ids_to_tokens(token))
        if token in self._added:
            return piece.encode()
        if self._byte_level and set(piece) <= _BYTE_OF.keys():
            return bytes(_BYTE_OF[character] for character in piece)
        if _BYTE_TOKEN.fullmatch(piece):
            return bytes([int(piece[3:5], 16)])
        if not is_first and piece.startswith(_SPACE) and not text.startswith(" "):
            text = " " + text
        return text.encode()


_SPACE = "\u2581"  # of SentencePiece
_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")


def _bytes_by_character() -> dict[str, int]:
    """The byte that each character of a token stands for in byte-level BPE, as GPT-2 spells it."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    not_printable = [byte for byte in range(256) if byte not in printable]
    spelled = {chr(byte): byte for byte in printable}
    return spelled | {chr(256 + offset): byte for offset, byte in enumerate(not_printable)}


_BYTE_OF = _bytes_by_character()


def _is_byte_level(hf: Any) -> bool:
    """Whether tokens are spelled as in byte-level BPE."""
    backend = getattr(hf, "backend_tokenizer", None)
    if backend is not None:
        return "ByteLevel" in str((json.loads(backend.to_str()) or {}).get("decoder"))
    return hasattr(hf, "byte_decoder")


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
    text_offsets: list[int] = field(default_factory=list)  # where each token begins in ``text``
    cached_tokens: int = 0  # tokens of the prompt that were not computed again
    reasoning_tokens: int = 0  # tokens of the answer between the marks of reasoning
    routed_experts: str | None = None  # experts of its tokens, if requested, when it is over

    def add(self, progress: ChoiceProgress) -> None:
        self.text += progress.piece
        self.tokens += len(progress.tokens)
        self.logprobs += progress.logprobs
        self.prompt_logprobs += progress.prompt_logprobs
        self.finish_reason = progress.finish_reason
        self.text_offsets += progress.text_offsets
        self.cached_tokens = progress.cached_tokens
        self.routed_experts = progress.routed_experts


def _experts_field(choice: Choice) -> Json:
    """Return vLLM's field with the experts of a choice that is over and asked for them."""
    return {} if choice.routed_experts is None else {"routed_experts": choice.routed_experts}


def usage(prompts: Sequence[Sequence[int]], choices: Sequence[Choice]) -> Json:
    """Return the token counts of an answer.

    Args:
        prompts: Token ids of each prompt.
        choices: The choices of the first prompt, those of the second, and so on.
    """
    prompt = sum(map(len, prompts))
    completion = sum(choice.tokens for choice in choices)
    # later choices of a prompt also reuse the first one, which is part of the same request
    first_choices = choices[:: len(choices) // len(prompts)]
    cached = sum(choice.cached_tokens for choice in first_choices)
    reasoning = sum(choice.reasoning_tokens for choice in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }


class _WrittenText:
    """Counts the characters of a text, of which a token may be a part only."""

    def __init__(self, texts: TokenTexts) -> None:
        self.characters = 0
        self._texts = texts
        self._is_first = True
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int, echoed: str | None) -> None:
        """Add a token; an ``echoed`` prompt may have special tokens in its text."""
        special = self._texts.special_text(token)
        if special is not None:
            if echoed is not None and echoed.startswith(special, self.characters):
                self.characters += len(special)
            return
        self.characters += len(self._decoder.decode(self._texts.bytes_of(token, self._is_first)))
        self._is_first = False


@dataclass
class CompletionFormat:
    """Response format of ``/v1/completions``."""

    kind = "text_completion"
    chunk_kind = "text_completion"

    texts: TokenTexts  # texts of single tokens
    top: int | None = None  # number of most likely tokens to return; None for no log-probabilities
    _written: dict[int, "_WrittenText"] = field(default_factory=dict)

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

    def piece(self, choice: Choice, progress: ChoiceProgress) -> Json | None:
        if not (progress.piece or progress.logprobs or progress.finish_reason is not None):
            return None
        return self._choice(choice, progress.piece, progress.logprobs, False)

    def _choice(
        self,
        choice: Choice,
        text: str,
        logprobs: Sequence[TokenLogprob],
        echo: bool,
        over: bool = True,
    ) -> Json:
        formatted = None if self.top is None else self._logprobs(choice, logprobs, echo)
        reason = choice.finish_reason if over else None
        return {
            "index": choice.index,
            "text": text,
            "logprobs": formatted,
            "finish_reason": reason,
            **_experts_field(choice),
        }

    def _logprobs(self, choice: Choice, logprobs: Sequence[TokenLogprob], echo: bool) -> Json:
        lists: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        if echo:
            self._append(lists, choice, choice.prompt[0], None)
            for token_logprob in choice.prompt_logprobs:
                self._append(lists, choice, token_logprob.token, token_logprob)
        for token_logprob in logprobs:
            self._append(lists, choice, token_logprob.token, token_logprob)
        return lists

    def _append(
        self, lists: Json, choice: Choice, token: int, token_logprob: TokenLogprob | None
    ) -> None:
        written = self._written.setdefault(choice.index, _WrittenText(self.texts))
        lists["tokens"].append(self.texts.of(token))
        lists["text_offset"].append(written.characters)
        written.add(token, choice.echoed)
        lists["token_logprobs"].append(None if token_logprob is None else token_logprob.logprob)
        lists["top_logprobs"].append(
            None if token_logprob is None or not self.top else self._top(token_logprob)
        )

    def _top(self, token_logprob: TokenLogprob) -> Json:
        """Return log-probabilities by text; of tokens with the same text, the most likely one."""
        ranked = {
            **token_logprob.top,
            **(
                {token_logprob.token: token_logprob.logprob}
                if token_logprob.token not in token_logprob.top
                else {}
            ),
        }
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
    answer_format: AnswerFormat | None = None  # how to read answers; None if all of them is content
    _begun: set[int] = field(default_factory=set[int])  # choices whose first token is written
    _writers: dict[int, MessageWriter] = field(default_factory=dict[int, MessageWriter])

    def whole(self, choice: Choice) -> Json:
        writer = self._writer(choice)
        message = {**writer.write_message(choice.text), "refusal": None}
        choice.reasoning_tokens = writer.count_reasoning_tokens(choice.text_offsets)
        return self._choice(choice, "message", message, choice.logprobs)

    def first_pieces(self, choice: Choice) -> list[Json]:
        delta = {"role": "assistant", "content": ""}
        return [{"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}]

    def piece(self, choice: Choice, progress: ChoiceProgress) -> Json | None:
        writer = self._writer(choice)
        is_over = progress.finish_reason is not None
        delta = writer.add(progress.piece, is_over)
        if is_over:
            choice.reasoning_tokens = writer.count_reasoning_tokens(choice.text_offsets)
        if not delta and not progress.logprobs and not is_over:
            return None
        return self._choice(choice, "delta", delta, progress.logprobs)

    def _writer(self, choice: Choice) -> MessageWriter:
        """Return what writes the message of a choice."""
        if choice.index not in self._writers:
            self._writers[choice.index] = MessageWriter(self.answer_format)
        return self._writers[choice.index]

    def _choice(
        self, choice: Choice, name: str, value: Json, logprobs: Sequence[TokenLogprob]
    ) -> Json:
        content = (
            None
            if self.top is None
            else {"content": [self._logprob(choice, token_logprob) for token_logprob in logprobs]}
        )
        return {
            "index": choice.index,
            name: value,
            "logprobs": content,
            "finish_reason": self._finish_reason(choice),
            **_experts_field(choice),
        }

    def _finish_reason(self, choice: Choice) -> str | None:
        has_calls = self._writer(choice).call_count > 0
        return (
            "tool_calls" if has_calls and choice.finish_reason == "stop" else choice.finish_reason
        )

    def _logprob(self, choice: Choice, token_logprob: TokenLogprob) -> Json:
        is_first = choice.index not in self._begun
        self._begun.add(choice.index)
        top = [
            self._token(token, logprob, is_first)
            for token, logprob in list(token_logprob.top.items())[: self.top]
        ]
        return {
            **self._token(token_logprob.token, token_logprob.logprob, is_first),
            "top_logprobs": top,
        }

    def _token(self, token: int, logprob: float, is_first: bool) -> Json:
        written = list(self.texts.bytes_of(token, is_first))
        return {"token": self.texts.of(token), "logprob": logprob, "bytes": written}


Format = CompletionFormat | ChatFormat
