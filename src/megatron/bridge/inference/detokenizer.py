# SPDX-License-Identifier: Apache-2.0
"""Text of tokens that arrive one by one, and the texts that end it."""

from collections.abc import Sequence
from typing import Any

_REPLACEMENT = "\ufffd"


class Detokenizer:
    """Turns tokens into pieces of text that join to the text of all of them.

    A piece is held back while its last character may be incomplete, or while it may be the beginning of a stop
    text.
    """

    def __init__(self, hf: Any, stop: Sequence[str] = ()) -> None:
        self._hf = hf
        self._stop = tuple(stop)
        self._ids: list[int] = []
        self._first = 0  # the tokens from here on are decoded together, so that spaces between words are right
        self._read = 0  # tokens whose text is known
        self._held = ""
        self.text = ""
        """What was given out so far."""
        self.stopped = False
        """Whether a stop text has ended the text."""

    def add(self, token: int) -> str:
        """The text that is certain now that ``token`` came."""
        self._ids.append(token)
        return self._give_out(self._decode_new(final=False), final=False)

    def finish(self) -> str:
        return self._give_out(self._decode_new(final=True), final=True)

    def _decode_new(self, final: bool) -> str:
        known = self._decode(self._ids[self._first : self._read])
        text = self._decode(self._ids[self._first :])
        if not text.startswith(known) or (text.endswith(_REPLACEMENT) and not final):
            return "" if not final else text[len(known) :]
        self._first, self._read = self._read, len(self._ids)
        return text[len(known) :]

    def _decode(self, ids: list[int]) -> str:
        return self._hf.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _give_out(self, new: str, final: bool) -> str:
        if self.stopped:
            return ""
        self._held += new
        ends = [place for text in self._stop if (place := self._held.find(text)) >= 0]
        if ends:
            self.stopped = True
            piece, self._held = self._held[: min(ends)], ""
        else:
            keep = 0 if final else self._possible_stop()
            cut = len(self._held) - keep
            piece, self._held = self._held[:cut], self._held[cut:]
        self.text += piece
        return piece

    def _possible_stop(self) -> int:
        """How many of the last characters may begin a stop text."""
        longest = 0
        for text in self._stop:
            for length in range(min(len(text) - 1, len(self._held)), longest, -1):
                if text.startswith(self._held[-length:]):
                    longest = length
                    break
        return longest
