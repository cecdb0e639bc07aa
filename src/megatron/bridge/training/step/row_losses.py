# SPDX-License-Identifier: Apache-2.0
"""Rows that choose their adapter and their loss, and these losses."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.bridge.utils.errors import UserError

LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro")


@dataclass(frozen=True)
class TrainingRow:
    """One sequence, the adapter that learns from it, and the loss.

    With log-probabilities ``p`` of the targets and the ratio ``r = exp(p - sampled_logprobs)``, losses are sums over
    tokens: ``-weights * p`` (``cross_entropy``), ``-advantages * r`` (``importance_sampling``),
    ``-min(advantages * r, advantages * clip(r, clip_low, clip_high))`` (``ppo``), ``-advantages * p * c`` with
    ``c = clip(r, clip_low, clip_high)`` as a constant (``cispo``, https://arxiv.org/abs/2506.13585), and
    ``-(advantages * p - beta / 2 * (p - sampled_logprobs)^2)`` (``dro``, https://arxiv.org/abs/2405.19107).
    """

    adapter: str
    tokens: Sequence[int]
    targets: Sequence[int]  # the token to predict at each position
    loss: str = "cross_entropy"
    weights: Sequence[float] | None = None  # of cross_entropy; None is 1 everywhere
    sampled_logprobs: Sequence[float] | None = None  # of the other losses
    advantages: Sequence[float] | None = None
    clip_low: float = 0.8
    clip_high: float = 1.2
    beta: float = 0.05  # of dro

    def factors(self) -> Sequence[float]:
        """Return what each token's loss is multiplied with."""
        if self.loss != "cross_entropy":
            return self.advantages or ()
        return [1.0] * len(self.targets) if self.weights is None else self.weights

    def check(self, vocab_size: int, longest: int) -> None:
        """Refuse a row that cannot be computed.

        Args:
            vocab_size: Number of token ids.
            longest: Maximum number of tokens.
        """
        if self.loss not in LOSSES:
            raise UserError(f"loss={self.loss!r}: use one of {', '.join(LOSSES)}")
        length = len(self.tokens)
        if not 1 <= length <= longest:
            raise UserError(f"tokens has {length} entries: a row has 1 to {longest}")
        for key, ids in {"tokens": self.tokens, "targets": self.targets}.items():
            if not all(isinstance(token, int) and 0 <= token < vocab_size for token in ids):
                raise UserError(
                    f"{key} has an id outside the vocabulary: use 0 to {vocab_size - 1}"
                )
        values: dict[str, Sequence[Any] | None] = {"targets": self.targets}
        if self.loss == "cross_entropy":
            values["weights"] = self.factors()
        else:
            values["sampled_logprobs"] = self.sampled_logprobs
            values["advantages"] = self.advantages
        for key, entries in values.items():
            if entries is None or len(entries) != length:
                count = "no" if entries is None else len(entries)
                raise UserError(f"{key} has {count} entries: give one for each of {length} tokens")
            if not all(math.isfinite(entry) for entry in entries):
                raise UserError(f"{key} has a number that is not finite: leave the row out")
        self._check_settings()

    def _check_settings(self) -> None:
        if not 0 <= self.clip_low <= self.clip_high < math.inf:
            raise UserError(
                f"clip_low={self.clip_low}, clip_high={self.clip_high}: both are ratios, the lower one first"
            )
        if not 0 <= self.beta < math.inf:
            raise UserError(f"beta={self.beta}: must be a finite number of at least 0")


def compute_loss(
    row: TrainingRow, logprobs: Tensor, factors: Tensor, sampled: Tensor, positions: Tensor
) -> Tensor:
    """Return the sum of the losses of a row's tokens.

    Args:
        row: The row, which names the loss.
        logprobs: Log-probabilities of the targets, [tokens].
        factors: Weights or advantages, [tokens]; 0 for padding.
        sampled: Log-probabilities of the targets when they were sampled, [tokens].
        positions: Positions of the tokens in the row, [tokens]; those of padding are after its end.
    """
    if row.loss == "cross_entropy":
        return -(logprobs * factors).sum()
    ratios = torch.exp(logprobs - sampled)
    if row.loss == "importance_sampling":
        return -(ratios * factors).sum()
    if row.loss == "dro":
        penalties = 0.5 * row.beta * (logprobs - sampled).square()
        penalties = torch.where(positions < len(row.tokens), penalties, 0.0)
        return -(logprobs * factors - penalties).sum()
    clipped = ratios.clamp(row.clip_low, row.clip_high)
    if row.loss == "cispo":
        return -(clipped.detach() * logprobs * factors).sum()
    return -torch.minimum(ratios * factors, clipped * factors).sum()
