# SPDX-License-Identifier: Apache-2.0
"""Find the tokens that end a turn in tokenized conversations."""

from typing import TYPE_CHECKING

import numpy as np

from megatron.bridge.data.records.record_config import TrainOnEOS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TurnEndings:
    """Finds the tokens that end a turn, which white space may follow."""

    def __init__(self, hf: "PreTrainedTokenizerBase", end_tokens: frozenset[int]) -> None:
        self._hf = hf
        self._end_tokens = end_tokens
        self._blank: dict[int, bool] = {}

    def end(self, ids: np.ndarray) -> bool:
        """Return whether the tokens end a turn; tokens of white space alone count as if they did."""
        for token in ids[::-1].tolist():
            if token in self._end_tokens:
                return True
            if not self._is_blank(token):
                return False
        return True

    def after(self, ids: np.ndarray, answer: np.ndarray) -> np.ndarray:
        """Return which of ``ids`` end the turn right after an answer that does not end itself.

        ``answer`` is bool, true for its tokens.
        """
        ending = np.zeros(len(ids), dtype=np.bool_)
        places = np.flatnonzero(answer)
        if not len(places) or self.end(ids[answer]):
            return ending
        for position in range(int(places[-1]) + 1, len(ids)):
            if int(ids[position]) in self._end_tokens:
                ending[position] = True
            elif self._is_blank(int(ids[position])):
                continue
            break
        return ending

    def choose(
        self, ids: np.ndarray, trained: np.ndarray, train_on_eos: TrainOnEOS | None
    ) -> np.ndarray:
        """Return ``trained`` with all tokens that end turns, or with the last one alone, as ``train_on_eos`` says."""
        if train_on_eos in (None, "turn"):
            return trained
        ends = np.isin(ids, list(self._end_tokens))
        if train_on_eos == "all":
            return trained | ends
        chosen = trained & ~ends
        places = np.flatnonzero(ends)
        if len(places):
            chosen[places[-1]] = True
        return chosen

    def _is_blank(self, token: int) -> bool:
        if token not in self._blank:
            self._blank[token] = not str(self._hf.decode([token])).strip()
        return self._blank[token]
