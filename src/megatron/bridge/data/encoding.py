# SPDX-License-Identifier: Apache-2.0
"""From records to tokenised samples. Nothing is dropped, cut or masked without being counted."""

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from megatron.bridge.data.chat import ChatTemplate, Rendered, TrainOn
from megatron.bridge.data.examples import Example, Examples, Report
from megatron.bridge.data.messages import Chat, Pair, Sample, Text, parse
from megatron.bridge.data.tokenizer import HuggingFaceTokenizer, Tokenizer, encode_many, encode_with_offsets
from megatron.bridge.data.truncation import Truncation, shorten
from megatron.bridge.utils.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Numbered = tuple[str, dict[str, Any]]  # where a record stands (file and line), and the record
NO_TARGET = "without a token to learn"
TOO_LONG = "as too long"
BY_FUNCTION = "by process_example_fn"
INSIDE_A_TOKEN = "answers begin or end inside a token, which is learnt as a whole"
NO_END = "answers do not end with a special token: the model does not learn to stop there"
EMPTY = "answers are empty: the model learns to stop at once"
SYSTEMS = "conversations have several system messages"
CONTROL = "messages hold a control token of the tokenizer as text: the model takes it for the template's own"


@dataclass(frozen=True)
class EncodingRules:
    """How records become samples; the values of a data set's config.

    Attributes:
        max_tokens: longest sample: one token more than a row, because the last is only predicted.
        truncation: what happens to longer ones.
        train_on: which part is learnt.
        split_turns: make a sample of each answer and what came before it.
        chat_template: a template instead of the tokenizer's own.
        chat_template_options: values that the template reads.
        process_example_fn: turns a record into one of the known forms; gets the tokenizer too if it takes two
            arguments. A record for which it returns None is left out.
    """

    max_tokens: int
    truncation: Truncation = "refuse"
    train_on: TrainOn = "assistant"
    split_turns: bool = False
    chat_template: str | None = None
    chat_template_options: dict[str, Any] = field(default_factory=dict)
    process_example_fn: Callable[..., dict[str, Any] | None] | None = None


class Encoded(NamedTuple):
    """Samples of some records, and what became of the others."""

    examples: Examples
    report: Report


class _Draft(NamedTuple):
    """A sample before it is cut: where it stands, and its tokens."""

    where: str
    example: Example


class Encoder:
    """Tokenises records.

    Raises:
        UserError: the tokenizer cannot do what the rules need.
    """

    def __init__(self, tokenizer: Tokenizer, rules: EncodingRules) -> None:
        self.tokenizer = tokenizer
        self.rules = rules
        self._process = _with_tokenizer(rules.process_example_fn, tokenizer)
        self._template: ChatTemplate | None = None
        self._opening = _opening(tokenizer)
        self._control = _control_tokens(tokenizer)

    def __call__(self, records: Sequence[Numbered]) -> Encoded:
        """The samples of ``records``, in their order.

        Raises:
            UserError: a record has no known form, cannot be masked, or is too long with ``truncation=refuse``.
        """
        report = Report(records=len(records))
        kept = [draft for draft in self._drafts(records, report) if self._keep(draft, report)]
        kept = [self._fit(draft, report) for draft in kept]
        kept = [draft for draft in kept if _has_target(draft, report)]
        report.notes = +report.notes  # without what did not occur
        examples = Examples.of(draft.example for draft in kept)
        report.samples, report.tokens = len(kept), len(examples.tokens)
        report.trained = int(examples.trained.sum())
        return Encoded(examples, report)

    def _drafts(self, records: Sequence[Numbered], report: Report) -> Iterator[_Draft]:
        """Tokenised all at once: several times as fast as one by one."""
        samples = list(self._samples(records, report))
        chats = self._chats([self._render(where, s) for where, s in samples if isinstance(s, Chat)], report)
        plain = self._plain([s for _, s in samples if not isinstance(s, Chat)])
        for where, sample in samples:
            yield _Draft(where, next(chats if isinstance(sample, Chat) else plain))

    def _samples(self, records: Sequence[Numbered], report: Report) -> Iterator[tuple[str, Sample]]:
        for where, record in records:
            processed = self._process(record) if self._process else record
            if processed is None:
                report.dropped[BY_FUNCTION] += 1
                continue
            parsed = parse(processed, where)
            self._note(parsed, report)
            for sample in self._turns(parsed):
                yield where, sample

    def _turns(self, sample: Sample) -> Iterator[Sample]:
        """With ``split_turns``, each answer with what came before it."""
        if not (self.rules.split_turns and isinstance(sample, Chat)):
            yield sample
            return
        for place in sample.answers:
            if place not in sample.excluded:
                yield replace(sample, messages=sample.messages[: place + 1], completion=None)

    def _plain(self, samples: Sequence[Pair | Text]) -> Iterator[Example]:
        """Prompt and completion are tokenised apart: a prompt at inference has the same tokens."""
        first = [sample.prompt if isinstance(sample, Pair) else sample.text for sample in samples]
        rest = [sample.completion for sample in samples if isinstance(sample, Pair)]
        beginnings = encode_many(self.tokenizer, first, special=True)
        completions = iter(encode_many(self.tokenizer, rest, special=False))
        for sample, beginning in zip(samples, beginnings, strict=True):
            pair = isinstance(sample, Pair)
            ids = [*beginning, *(next(completions) if pair else ()), self.tokenizer.eod]
            learn_from = len(beginning) if pair and self.rules.train_on != "everything" else 1
            yield Example(np.array(ids, np.int32), np.arange(len(ids)) >= max(learn_from, 1))

    @property
    def template(self) -> ChatTemplate:
        """The chat template; made when the first conversation comes."""
        if self._template is None:
            if not isinstance(self.tokenizer, HuggingFaceTokenizer) or not self.tokenizer.hf.is_fast:
                raise UserError(
                    "conversations need a tokenizer that knows which characters each token stands for (a fast "
                    "Hugging Face tokenizer): convert the tokenizer, or use prompt and completion"
                )
            self._template = ChatTemplate(
                self.tokenizer.hf, self.rules.chat_template, self.rules.chat_template_options
            )
        return self._template

    def _render(self, where: str, chat: Chat) -> Rendered:
        return self.template.render(chat, "last" if self.rules.split_turns else self.rules.train_on, where)

    def _note(self, sample: Sample, report: Report) -> None:
        """Count what is rarely meant."""
        if isinstance(sample, Pair):
            report.notes[EMPTY] += not sample.completion
        if not isinstance(sample, Chat):
            return
        messages = sample.messages
        report.notes[SYSTEMS] += sum(message["role"] in ("system", "developer") for message in messages) > 1
        if self._control is not None:
            report.notes[CONTROL] += sum(bool(self._control.search(message["content"])) for message in messages)
        learnt = [messages[place] for place in sample.answers if place not in sample.excluded]
        report.notes[EMPTY] += sum(
            not message["content"] and not message.keys() - {"role", "content"} for message in learnt
        )

    def _chats(self, rendered: list[Rendered], report: Report) -> Iterator[Example]:
        if not rendered:
            return
        assert isinstance(self.tokenizer, HuggingFaceTokenizer)
        endings = _Endings(self.tokenizer.hf)
        encoded = encode_with_offsets(self.tokenizer.hf, [chat.text for chat in rendered])
        for chat, (tokens, offsets) in zip(rendered, encoded, strict=True):
            ids = np.array(tokens, dtype=np.int32)
            starts, ends = coverage(np.array(offsets, dtype=np.int64).reshape(-1, 2))
            trained = np.zeros(len(ids), dtype=np.bool_)
            for first, last in chat.spans:
                inside = (ends > first) & (starts < last)
                trained |= inside
                straddling = ((starts < first) & (ends > first)) | ((starts < last) & (ends > last))
                report.notes[INSIDE_A_TOKEN] += int(straddling.any())
                report.notes[NO_END] += not endings.special(ids[inside])
            trained[:1] = False
            yield Example(ids, trained)

    def _keep(self, draft: _Draft, report: Report) -> bool:
        length = len(draft.example.tokens)
        if length <= self.rules.max_tokens:
            return True
        if self.rules.truncation == "refuse":
            raise UserError(
                f"{draft.where}: the sample has {length - 1} tokens, more than dataset.seq_length="
                f"{self.rules.max_tokens - 1}: raise it, or choose dataset.truncation=drop, right, left or "
                f"keep_answer"
            )
        if self.rules.truncation == "drop":
            report.dropped[TOO_LONG] += 1
            return False
        return True

    def _fit(self, draft: _Draft, report: Report) -> _Draft:
        if len(draft.example.tokens) <= self.rules.max_tokens:
            return draft
        report.cut += 1
        cut = shorten(draft.example, self.rules.max_tokens, self.rules.truncation, self._opening)
        return draft._replace(example=cut)


def coverage(offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """First and behind-last character of each token, without gaps between tokens.

    Tokenizers may leave white space out of a token's offsets; it belongs to the token that comes next. Tokens that
    share a character (a character of several bytes) keep it both.
    """
    ends = np.maximum.accumulate(offsets[:, 1])
    before = np.concatenate(([0], ends[:-1]))[: len(ends)]
    return np.minimum(before, offsets[:, 0]), ends


class _Endings:
    """Tells whether a stretch of tokens ends with one of the tokenizer's own, white space aside."""

    def __init__(self, hf: "PreTrainedTokenizerBase") -> None:
        self._hf = hf
        self._special = set(hf.added_tokens_decoder)  # a property that builds a dict
        self._blank: dict[int, bool] = {}

    def special(self, ids: np.ndarray) -> bool:
        """Whether it does; also if there is nothing but white space, which has no end to learn."""
        for token in ids[::-1].tolist():
            if token in self._special:
                return True
            if token not in self._blank:
                self._blank[token] = not str(self._hf.decode([token])).strip()
            if not self._blank[token]:
                return False
        return True


def _has_target(draft: _Draft, report: Report) -> bool:
    found = bool(draft.example.trained.any())
    if not found:
        report.dropped[NO_TARGET] += 1
    return found


def _opening(tokenizer: Tokenizer) -> int | None:
    token = tokenizer.hf.bos_token_id if isinstance(tokenizer, HuggingFaceTokenizer) else None
    return token if isinstance(token, int) else None


def _control_tokens(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """Finds any of the tokenizer's special tokens in a text."""
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        return None
    special = [token.content for token in tokenizer.hf.added_tokens_decoder.values() if token.special]
    return re.compile("|".join(map(re.escape, special))) if special else None


def _with_tokenizer(
    function: Callable[..., dict[str, Any] | None] | None, tokenizer: Tokenizer
) -> Callable[[dict[str, Any]], dict[str, Any] | None] | None:
    """``function`` of a record alone; transformers' tokenizer is handed to one that takes two arguments."""
    if function is None:
        return None
    required = [
        entry
        for entry in inspect.signature(function).parameters.values()
        if entry.kind in (entry.POSITIONAL_ONLY, entry.POSITIONAL_OR_KEYWORD)
    ]
    if len(required) < 2:
        return function
    given = tokenizer.hf if isinstance(tokenizer, HuggingFaceTokenizer) else tokenizer
    return lambda record: function(record, given)
