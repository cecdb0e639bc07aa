# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingImports=false
"""Completions that follow a grammar: JSON schemas, regular expressions, choices, and grammars in Lark's notation.

A grammar is a text in the notation of llguidance, Lark's with JSON schemas. Before a token is sampled, the tokens that
cannot continue the completion are excluded; the end of the text is allowed where the grammar ends.
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megatron.bridge.utils.errors import UserError, one_line
from megatron.bridge.utils.optional_imports import import_optional

_WHITESPACE = (
    r"\n?[ \t]{0,40}"  # between JSON tokens; without a bound, a model may write spaces to the end
)
_MOST_CACHED = 64  # compiled grammars


def json_grammar(schema: Mapping[str, Any] | bool) -> str:
    """Return the grammar of JSON texts under a schema.

    Example:
        >>> json_grammar({"type": "null"}).startswith("start: %json {")
        True
    """
    return f"start: {json_rule(schema)}"


def json_rule(schema: Mapping[str, Any] | bool) -> str:
    """Return an expression of a Lark grammar for JSON texts under a schema."""
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    options = {"whitespace_pattern": _WHITESPACE}
    return "%json " + json.dumps({**schema, "x-guidance": options})


def regex_grammar(pattern: str) -> str:
    r"""Return the grammar of texts that a regular expression matches as a whole.

    Example:
        >>> regex_grammar("a/b")
        'start: /a\\/b/'
    """
    escaped = ""
    is_escaped = False
    for character in pattern:
        escaped += "\\/" if character == "/" and not is_escaped else character
        is_escaped = character == "\\" and not is_escaped
    return "start: /" + escaped.replace("\n", "\\n") + "/"


def choice_grammar(choices: Sequence[str]) -> str:
    """Return the grammar of one of several texts.

    Example:
        >>> choice_grammar(["yes", "no"])
        'start: "yes" | "no"'
    """
    return "start: " + " | ".join(map(_quote, choices))


def written_grammar(text: str) -> str:
    """Return a grammar that a user wrote, in Lark's notation or in GBNF, as llama.cpp and vLLM take it."""
    if "::=" not in text:
        return text
    llguidance = _import_llguidance()
    try:
        return str(llguidance.gbnf_to_lark.any_to_lark(text))
    except Exception as error:  # its own parser raises errors of many types
        raise UserError(f"the grammar is not valid: {one_line(error)}") from error


def added_ids_by_text(hf: Any) -> dict[str, int]:
    """Return the added tokens of a tokenizer, which may be marks, by their text."""
    return {added.content: token for token, added in hf.added_tokens_decoder.items()}


def mark_expression(text: str, added_ids: Mapping[str, int]) -> str:
    """Return an expression of a Lark grammar for a text with added tokens, which texts in quotes never match.

    Example:
        >>> mark_expression("<s>[", {"<s>": 1})
        '<[1]> "["'
    """
    if not text:
        return ""
    marks = sorted((mark for mark in added_ids if mark), key=len, reverse=True)
    pattern = "|".join(map(re.escape, marks))
    parts = re.split(f"({pattern})", text) if marks else [text]
    expressions = [
        f"<[{added_ids[part]}]>" if part in added_ids else _quote(part) for part in parts if part
    ]
    return " ".join(expressions)


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def after_reasoning(
    grammar: str, begin: str, end: str, has_begun: bool, added_ids: Mapping[str, int]
) -> str:
    """Return the grammar of a text with reasoning before it.

    Args:
        grammar: Grammar of the text, with the rule ``start``.
        begin: Mark before the reasoning.
        end: Mark behind the reasoning.
        has_begun: Whether the prompt has the mark before the reasoning; if not, there may be no reasoning.
        added_ids: Added tokens by their text.
    """
    if end in added_ids:
        reasoning = f"reasoning: REASONED <[{added_ids[end]}]>\n{_reasoned(end)}"
    else:
        reasoning = f"reasoning[suffix={_quote(end)}]: /(.|\\n)*/"
    start = "start: reasoning SPACE_BEHIND answer_behind"
    if not has_begun:
        opening = mark_expression(begin, added_ids)
        start = f"start: ({opening} reasoning SPACE_BEHIND)? answer_behind"
    answer = _rename_start(grammar, "answer_behind")
    return "\n".join((start, reasoning, "SPACE_BEHIND: /\\n{0,2}/", answer))


def after_harmony_reasoning(grammar: str, added_ids: Mapping[str, int]) -> str:
    """Return the grammar of gpt-oss's final message, with or without a message of reasoning before it."""

    def expression(text: str) -> str:
        return mark_expression(text, added_ids)

    before = expression("<|channel|>analysis<|message|>")
    behind = expression("<|end|><|start|>assistant")
    final = expression("<|channel|>final<|message|>")
    start = f"start: ({before} REASONED {behind})? {final} answer_behind"
    answer = _rename_start(grammar, "answer_behind")
    return "\n".join((start, _reasoned("<|end|>"), answer))


def _reasoned(end: str) -> str:
    """Return the rule of a text before an added token ``end``, which it must not spell with other tokens."""
    spelled = re.escape(end).replace("/", "\\/")
    return f"REASONED: /(.|\\n)*/ & ~/(.|\\n)*{spelled}(.|\\n)*/"


def _rename_start(grammar: str, name: str) -> str:
    """Rename the rule ``start``, to which other rules do not refer."""
    return re.sub(r"^(\s*)\??start\s*:", rf"\1{name}:", grammar, count=1, flags=re.MULTILINE)


def _import_llguidance() -> Any:
    return import_optional("llguidance", "a grammar or a schema", "structured", is_setting=False)


class GrammarFailedError(RuntimeError):
    """Raised when a grammar that compiles is too complex for the text so far."""


class Grammars:
    """Compiles grammars for a tokenizer.

    Args:
        hf: Tokenizer of transformers; None without one.
        vocabulary: Number of logits.
        ends: Tokens that end a text.
    """

    def __init__(self, hf: Any, vocabulary: int, ends: frozenset[int]) -> None:
        self._hf = hf
        self._vocabulary = vocabulary
        self._ends = ends
        self._compiled: dict[str, Any] = {}

    def check(self, grammar: str) -> None:
        """Refuse a grammar that cannot be compiled."""
        if grammar not in self._compiled:
            self._compile(grammar)

    def make_matcher(self, grammar: str) -> Any:
        """Return an ``LLMatcher`` at the beginning of a text."""
        if grammar not in self._compiled:
            self._compile(grammar)
        return self._compiled[grammar].deep_copy()

    def _compile(self, grammar: str) -> None:
        llguidance = _import_llguidance()
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise UserError(f"the grammar cannot be used: {one_line(matcher.get_error()):.300}")
        while len(self._compiled) >= _MOST_CACHED:
            self._compiled.pop(next(iter(self._compiled)))
        self._compiled[grammar] = matcher

    @cached_property
    def _tokenizer(self) -> Any:
        backend = getattr(self._hf, "backend_tokenizer", None)
        if backend is None:
            raise UserError(
                "a grammar needs a fast tokenizer, which the model does not have: remove the grammar, or use a "
                "tokenizer that transformers loads as a fast one"
            )
        if not self._ends:
            raise UserError("a grammar needs an end token, which the model does not have")
        _import_llguidance()
        import llguidance.hf

        size = max(self._vocabulary, len(self._hf))
        try:
            return llguidance.hf.from_tokenizer(
                self._hf, n_vocab=size, eos_token=sorted(self._ends), slices=[]
            )
        except (ValueError, RuntimeError) as error:
            raise UserError(
                "a grammar cannot be used with the tokenizer of this model, whose decoder llguidance "
                f"does not read ({one_line(error):.200}): remove the grammar"
            ) from error

    @property
    def vocabulary(self) -> int:
        """Number of logits."""
        return self._vocabulary


class GrammarMatcher:
    """The position of one completion in its grammar; compiled where tokens are sampled."""

    def __init__(self, grammars: Grammars, grammar: str) -> None:
        self._grammars = grammars
        self._grammar = grammar
        self._matcher: Any = None
        self._read = 0  # number of tokens of the completion that the matcher has read

    def allowed_tokens(self, tokens: Sequence[int]) -> Tensor:
        """Return which tokens [vocabulary] can follow a completion, which grows from call to call.

        Raises:
            GrammarFailedError: the grammar is too complex for the completion.
        """
        if self._matcher is None or len(tokens) < self._read:
            self._matcher = self._grammars.make_matcher(self._grammar)
            self._read = 0
        new_tokens = list(tokens[self._read :])
        self._read = len(tokens)
        if new_tokens:
            self._matcher.consume_tokens(new_tokens)
        bits = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8)
        if self._matcher.is_error():
            raise GrammarFailedError(self._matcher.get_error())
        shifts = torch.arange(8, dtype=torch.uint8)
        allowed = (bits[:, None] >> shifts) & 1
        return allowed.reshape(-1)[: self._grammars.vocabulary].bool()
