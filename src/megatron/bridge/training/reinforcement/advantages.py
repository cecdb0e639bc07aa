# SPDX-License-Identifier: Apache-2.0
"""From the rewards of completions to their advantages."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.bridge.training.config.blocks.reinforcement import GRPOConfig

_EPSILON = 1e-4  # added to standard deviations


@dataclass(frozen=True)
class Scores:
    """What rewards say of the completions of a generation, in the order of their groups.

    Attributes:
        rewards: Weighted sum over the reward functions, NaN where all returned None, [completions].
        advantages: [completions]; 0 with a critic, whose advantages are those of tokens.
        has_signal: Whether the rewards of a group differ, bool [groups].
    """

    rewards: Tensor
    advantages: Tensor
    has_signal: Tensor


def score_rewards(by_function: Tensor, settings: GRPOConfig) -> Scores:
    """Compare the rewards within each group.

    Args:
        by_function: Rewards, NaN where a function returned None, fp32 [completions, functions].
        settings: Weights, estimator and scale.
    """
    rewards = weighted_sum(by_function, settings)
    groups = rewards.view(-1, settings.num_generations)
    match settings.advantage_estimator:
        case "rloo":
            advantages = _leave_one_out(groups)
        case "gae":
            advantages = torch.zeros_like(groups)
        case "group":
            advantages = (groups - groups.nanmean(1, keepdim=True)) / _scale(groups, settings)
    deviations = nan_std(groups, 1)
    has_signal = ~torch.isclose(deviations, torch.zeros_like(deviations))
    # a completion that no function scored teaches nothing
    return Scores(
        rewards, advantages.flatten().nan_to_num(nan=0.0), has_signal & ~deviations.isnan()
    )


def weighted_sum(by_function: Tensor, settings: GRPOConfig) -> Tensor:
    """The reward of each completion, NaN where no function scored it, [completions]."""
    weights = settings.reward_weights or [1.0] * by_function.size(1)
    rewards = (by_function * by_function.new_tensor(weights)).nansum(1)
    return rewards.masked_fill(by_function.isnan().all(1), torch.nan)


def generalized_advantages(
    rewards: Tensor, values: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """The advantages of the tokens of a completion, and their returns; ``CriticConfig`` has the formula.

    Args:
        rewards: Reward of each token that the model wrote, fp32 [tokens].
        values: What the critic predicted before each of these tokens, fp32 [tokens].
        gamma: How much a reward counts one token earlier.
        lam: 0 trusts the values, 1 the rewards alone.
    """
    next_value = 0.0
    next_advantage = 0.0
    reversed_advantages: list[float] = []
    for reward, value in zip(reversed(rewards.tolist()), reversed(values.tolist()), strict=True):
        error = reward + gamma * next_value - value
        next_advantage = error + gamma * lam * next_advantage
        next_value = value
        reversed_advantages.append(next_advantage)
    advantages = rewards.new_tensor(reversed_advantages[::-1])
    return advantages, advantages + values


def standardize(values: Tensor) -> Tensor:
    """``values`` with mean 0 and variance 1; a single value becomes 0."""
    if len(values) < 2:
        return torch.zeros_like(values)
    return (values - values.mean()) * torch.rsqrt(values.var() + 1e-8)


def _scale(groups: Tensor, settings: GRPOConfig) -> Tensor | float:
    match settings.scale_rewards:
        case "group":
            return nan_std(groups, 1).unsqueeze(1) + _EPSILON
        case "batch":
            return nan_std(groups.flatten(), 0) + _EPSILON
        case "none":
            return 1.0


def _leave_one_out(groups: Tensor) -> Tensor:
    """Rewards minus the mean of the other rewards of the group."""
    counts = (~groups.isnan()).sum(1, keepdim=True)
    others = (groups.nansum(1, keepdim=True) - groups.nan_to_num(nan=0.0)) / (counts - 1)
    return torch.where(counts > 1, groups - others, torch.zeros_like(groups))


def nan_std(values: Tensor, dim: int) -> Tensor:
    """The sample standard deviation along ``dim``, over values that are not NaN."""
    counts = (~values.isnan()).sum(dim)
    squares = (values - values.nanmean(dim, keepdim=True)).square().nansum(dim)
    return (squares / (counts - 1)).sqrt()
