# SPDX-License-Identifier: Apache-2.0
"""Response objects of OpenAI's endpoints: complete, or as a stream of chunks."""

import codecs
import json
import re
import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from megatron.bridge.inference.requests import TokenLogprob
from megatron.bridge.inference.server.answer_reader import AnswerFormat
from megatron.bridge.inference.server.engine_loop import ChoiceProgress
from megatron.bridge.inference.server.tool_parsers import Call

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
    routed_experts: str | None = None  # experts of its tokens, if requested, when it is over

    def add(self, progress: ChoiceProgress) -> None:
        self.text += progress.piece
        self.tokens += len(progress.tokens)
        self.logprobs += progress.logprobs
        self.prompt_logprobs += progress.prompt_logprobs
        self.finish_reason = progress.finish_reason
        self.routed_experts = progress.routed_experts


def _experts_field(choice: Choice) -> Json:
    """Return vLLM's field with the experts of a choice that is over and asked for them."""
    return {} if choice.routed_experts is None else {"routed_experts": choice.routed_experts}


def usage(prompts: Sequence[Sequence[int]], choices: Sequence[Choice]) -> Json:
    prompt = sum(map(len, prompts))
    completion = sum(choice.tokens for choice in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
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
    _readers: dict[int, Any] = field(default_factory=dict[int, Any])  # by index of the choice
    _calls: Counter[int] = field(default_factory=Counter[int])  # number of calls of each choice

    def whole(self, choice: Choice) -> Json:
        message: Json = {"role": "assistant", "content": choice.text, "refusal": None}
        if self.answer_format is not None:
            delta = self._read(choice, choice.text, is_over=True)
            message["content"] = delta.get("content", None if "tool_calls" in delta else "")
            if "reasoning_content" in delta:
                message["reasoning_content"] = delta["reasoning_content"]
            if "tool_calls" in delta:
                message["tool_calls"] = delta["tool_calls"]
                for call in message["tool_calls"]:
                    del call["index"]
        return self._choice(choice, "message", message, choice.logprobs)

    def first_pieces(self, choice: Choice) -> list[Json]:
        delta = {"role": "assistant", "content": ""}
        return [{"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}]

    def piece(self, choice: Choice, progress: ChoiceProgress) -> Json | None:
        delta: Json = {"content": progress.piece} if progress.piece else {}
        if self.answer_format is not None:
            delta = self._read(choice, progress.piece, progress.finish_reason is not None)
        if not delta and not progress.logprobs and progress.finish_reason is None:
            return None
        return self._choice(choice, "delta", delta, progress.logprobs)

    def _read(self, choice: Choice, text: str, is_over: bool) -> Json:
        """Return the parts of an answer that its next piece completes, as the fields of a delta."""
        assert self.answer_format is not None
        reader = self._readers.get(choice.index)
        if reader is None:
            reader = self._readers[choice.index] = self.answer_format.make_reader()
        delta: Json = {}
        for part in reader.add(text, is_over):
            if isinstance(part, Call):
                delta.setdefault("tool_calls", []).append(self._call(choice, part))
            else:
                name = "content" if part.kind == "content" else "reasoning_content"
                delta[name] = delta.get(name, "") + part.text
        return delta

    def _call(self, choice: Choice, call: Call) -> Json:
        assert self.answer_format is not None
        index = self._calls[choice.index]
        self._calls[choice.index] += 1
        tool_format = self.answer_format.tool_format
        is_short = tool_format is not None and tool_format.id_pattern == "short"
        call_id = call.id or (
            secrets.token_hex(5)[:9] if is_short else f"call_{secrets.token_hex(12)}"
        )
        function = {"name": call.name, "arguments": call.arguments}
        return {"index": index, "id": call_id, "type": "function", "function": function}

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
        has_calls = self._calls[choice.index] > 0
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
