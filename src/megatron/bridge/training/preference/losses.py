# SPDX-License-Identifier: Apache-2.0
"""The losses of answers, as functions of log-probabilities."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.bridge.training.config.blocks.dpo import DPOConfig


class LogProbs(NamedTuple):
    """Log-probabilities of answers, each [pairs]."""

    chosen: Tensor
    rejected: Tensor


class PairLosses(NamedTuple):
    """What is known about each pair, each [pairs]."""

    losses: Tensor
    chosen_rewards: Tensor  # ``beta (log p - log r)`` of the chosen answers, without gradient
    rejected_rewards: Tensor


def pair_losses(policy: LogProbs, reference: LogProbs, settings: DPOConfig) -> PairLosses:
    """The loss of each pair; see ``DPOConfig`` for the formulas.

    Log-probabilities are sums over tokens, means for ``ipo``.
    """
    chosen, rejected = (ours - theirs for ours, theirs in zip(policy, reference, strict=True))
    return PairLosses(
        _losses(chosen - rejected, settings), settings.beta * chosen.detach(), settings.beta * rejected.detach()
    )


def _losses(margin: Tensor, settings: DPOConfig) -> Tensor:
    beta, smoothing = settings.beta, settings.label_smoothing
    match settings.loss_type:
        case "sigmoid":
            return -F.logsigmoid(beta * margin) * (1 - smoothing) - F.logsigmoid(-beta * margin) * smoothing
        case "ipo":
            return (margin - 1 / (2 * beta)).square()
        case "hinge":
            return torch.relu(1 - beta * margin)
        case "kto":
            raise AssertionError("kto has no pairs: call kto_losses")


def kto_losses(ratios: Tensor, desirable: Tensor, kl: Tensor, settings: DPOConfig) -> Tensor:
    """The loss of each answer, [answers]; see ``DPOConfig`` for the formula.

    ``ratios`` are ``log p - log r``, [answers], ``desirable`` is bool, [answers], and ``kl`` the estimate ``z0``.
    """
    gain = settings.beta * (ratios - kl)
    return torch.where(
        desirable, settings.desirable_weight * torch.sigmoid(-gain), settings.undesirable_weight * torch.sigmoid(gain)
    )
