# SPDX-License-Identifier: Apache-2.0
"""Draft the next tokens of a text, so that one step can compute several of them.

A step computes the logits after the last token and after each draft, and samples a token from each. A draft is
accepted if it is the token that was sampled before it. Because a row has the same bits in any batch, and the random
number of a token depends on its position alone, texts are bitwise those without drafts, sampled ones too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

from megatron.bridge.inference.scheduler import ScheduledText
from megatron.bridge.utils.errors import UserError, did_you_mean

METHODS = ("ngram", "mtp")
_MOST_TOKENS = 32


@dataclass(frozen=True)
class Speculation:
    """How drafts are made; the names are those of vLLM."""

    # ``ngram`` looks up what followed the last tokens earlier in the text, and ``mtp`` asks the model's own layer of
    # multi-token prediction
    method: str = "ngram"
    num_speculative_tokens: int = 4  # maximum drafts of a text in each step
    prompt_lookup_max: int = 4  # maximum tokens that are looked up together; longer matches first
    prompt_lookup_min: int = 2  # minimum tokens that are looked up together

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise UserError(
                f"speculative method={self.method!r} must be one of {', '.join(METHODS)}"
            )
        limits = {
            "num_speculative_tokens": _MOST_TOKENS,
            "prompt_lookup_max": _MOST_TOKENS,
            "prompt_lookup_min": self.prompt_lookup_max,
        }
        for name, most in limits.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
                raise UserError(f"speculative {name}={value!r} must be a number from 1 to {most}")

    @classmethod
    def of(cls, values: Mapping[str, Any] | None) -> "Speculation | None":
        """Return the settings of ``LLM(speculative=...)``; None for None."""
        if values is None:
            return None
        names = [field.name for field in fields(cls)]
        for name in values:
            if name not in names:
                raise UserError(
                    f"speculative has no setting {name}{did_you_mean(name, names)}: it has {', '.join(names)}"
                )
        return cls(**values)


def uses_mtp(settings: Speculation | None) -> bool:
    """Return whether drafts need the model's layers of multi-token prediction."""
    return settings is not None and settings.method == "mtp"


class Drafter(Protocol):
    """Proposes drafts; all ranks get the same ones."""

    def propose(self, text: ScheduledText, most: int) -> list[int]:
        """Return at most ``most`` tokens that may follow ``text``."""
        ...

    def forget(self, text: ScheduledText) -> None:
        """Free what is known about a text that has ended."""
        ...


class NgramDrafter:
    """Propose the tokens that followed the last tokens of a text where these occurred before, most recently.

    Args:
        settings: lengths of the n-grams.
    """

    def __init__(self, settings: Speculation) -> None:
        self._lengths = range(settings.prompt_lookup_min, settings.prompt_lookup_max + 1)
        self._texts: dict[int, _NgramIndex] = {}

    def propose(self, text: ScheduledText, most: int) -> list[int]:
        index = self._texts.get(id(text))
        if index is None:
            index = self._texts[id(text)] = _NgramIndex(self._lengths)
        return index.followers(text.tokens, most)

    def forget(self, text: ScheduledText) -> None:
        self._texts.pop(id(text), None)


class _NgramIndex:
    """Where each n-gram of a growing text ended last."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = lengths
        self._ends: dict[tuple[int, ...], int] = {}
        self._read = 0  # number of tokens whose n-grams are known; one fewer than those of the text

    def followers(self, tokens: Sequence[int], most: int) -> list[int]:
        """Return up to ``most`` tokens after the latest earlier occurrence of the longest n-gram at the end."""
        for end in range(self._read + 1, len(tokens)):
            for length in self._lengths:
                if length <= end:
                    self._ends[tuple(tokens[end - length : end])] = end
        self._read = max(self._read, len(tokens) - 1)
        for length in reversed(self._lengths):
            end = self._ends.get(tuple(tokens[-length:])) if length <= len(tokens) else None
            if end is not None:
                return list(tokens[end : end + most])
        return []
