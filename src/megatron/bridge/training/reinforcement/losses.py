# SPDX-License-Identifier: Apache-2.0
"""The losses of tokens that a model wrote itself; ``GRPOConfig`` has the formulas.

Tensors are flat, one value for each token of a packed row. Tokens of prompts and padding have mask 0.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.bridge.training.config.blocks.reinforcement import CLIPPED_LOSSES, GRPOConfig

_LOWEST_LOG_WEIGHT = math.log(1e-8)
_HIGHEST_LOG_WEIGHT = 20.0


@dataclass(frozen=True)
class CompletionTokens:
    """What a loss needs to know of the tokens of a microbatch, besides their log-probabilities.

    Attributes:
        mask: 1 for tokens in the loss, else 0, fp32 [tokens].
        lengths: Tokens in the loss of the completion of each token, at least 1, fp32 [tokens].
        advantages: Advantage of each token, without a critic that of its completion, fp32 [tokens].
        sum_of_sequence: Maps values [tokens] to their sum over the sequence of each token [tokens],
            over all context-parallel ranks, with gradients.
        old_log_probs: Log-probabilities at generation; None takes those of now.
        reference_log_probs: Log-probabilities under the reference; None without one.
        corrections: Ratios of probabilities in training and in generation; None without.
    """

    mask: Tensor
    lengths: Tensor
    advantages: Tensor
    sum_of_sequence: Callable[[Tensor], Tensor]
    old_log_probs: Tensor | None = None
    reference_log_probs: Tensor | None = None
    corrections: Tensor | None = None

    def mean_of_sequence(self, values: Tensor) -> Tensor:
        """The mean over the tokens in the loss of each token's sequence, [tokens]."""
        return self.sum_of_sequence(values * self.mask) / self.lengths


@dataclass(frozen=True)
class PolicyLosses:
    """Values of each token, [tokens]; those of tokens outside of the loss mean nothing."""

    losses: Tensor
    kl: Tensor | None  # None without a reference
    clipped_low: Tensor  # whether the ratio is clipped at the lower end, as a number
    clipped_high: Tensor


def policy_losses(
    log_probs: Tensor, tokens: CompletionTokens, settings: GRPOConfig
) -> PolicyLosses:
    """The loss of each token; ``log_probs`` [tokens] are those of the trained model."""
    old_log_probs = tokens.old_log_probs
    if old_log_probs is None:
        old_log_probs = log_probs.detach()
    log_ratios = log_probs - old_log_probs
    if settings.importance_sampling_level == "sequence":
        ratios = tokens.mean_of_sequence(log_ratios).exp()
    else:
        ratios = log_ratios.exp()
    clipped_low, clipped_high = _clipped(ratios, tokens.advantages, settings)
    losses = _losses(log_probs, log_ratios, ratios, tokens, settings)
    if tokens.corrections is not None and settings.loss_type != "vespo":
        losses = losses * tokens.corrections
    kl = None
    if tokens.reference_log_probs is not None:
        kl = kl_estimates(log_probs, tokens.reference_log_probs, settings.kl_estimator)
        if settings.use_bias_correction_kl:
            kl = kl * ratios
        if not settings.has_kl_in_reward:
            losses = losses + settings.beta * kl
        kl = kl.detach()
    return PolicyLosses(losses, kl, clipped_low, clipped_high)


def _losses(
    log_probs: Tensor,
    log_ratios: Tensor,
    ratios: Tensor,
    tokens: CompletionTokens,
    settings: GRPOConfig,
) -> Tensor:
    advantages = tokens.advantages
    match settings.loss_type:
        case "cispo":
            return -ratios.clamp(max=settings.highest_ratio).detach() * advantages * log_probs
        case "sapo":
            temperatures = torch.where(
                advantages > 0, settings.sapo_temperature_pos, settings.sapo_temperature_neg
            )
            return -torch.sigmoid(temperatures * (ratios - 1)) * 4 / temperatures * advantages
        case "vespo":
            weights = gamma_weights(log_ratios.detach(), tokens, settings)
            return -weights * advantages * log_probs
        case _:
            inside = ratios.clamp(1 - settings.epsilon, 1 + settings.highest_ratio)
            if settings.delta is not None:
                ratios = ratios.clamp(max=settings.delta)
            return -torch.min(ratios * advantages, inside * advantages)


def _clipped(ratios: Tensor, advantages: Tensor, settings: GRPOConfig) -> tuple[Tensor, Tensor]:
    """Whether each ratio is clipped at the lower and at the upper end, as numbers."""
    ratios = ratios.detach()
    none = torch.zeros_like(ratios)
    if settings.loss_type == "cispo":
        return none, ((ratios > settings.highest_ratio) & (advantages > 0)).float()
    if settings.loss_type not in CLIPPED_LOSSES:
        return none, none
    low = (ratios < 1 - settings.epsilon) & (advantages < 0)
    high = (ratios > 1 + settings.highest_ratio) & (advantages > 0)
    return low.float(), high.float()


def kl_estimates(log_probs: Tensor, reference_log_probs: Tensor, estimator: str) -> Tensor:
    """Estimates of KL(model || reference) from one sample of each token, [tokens].

    See http://joschu.net/blog/kl-approx.html.
    """
    difference = reference_log_probs - log_probs
    match estimator:
        case "k1":
            return -difference
        case "k2":
            return difference.square() / 2
        case _:
            return difference.exp() - difference - 1


def gamma_weights(log_ratios: Tensor, tokens: CompletionTokens, settings: GRPOConfig) -> Tensor:
    """The weight of the sequence of each token (VESPO, https://arxiv.org/abs/2602.10693), [tokens].

    With the ratio ``w`` of the probabilities of the sequence, it is ``e**l w**k e**(-l w)``.
    """
    log_weights = tokens.sum_of_sequence(log_ratios.clamp(-20.0, 20.0) * tokens.mask)
    if tokens.corrections is not None:
        log_corrections = tokens.corrections.log().clamp(_LOWEST_LOG_WEIGHT, _HIGHEST_LOG_WEIGHT)
        if settings.importance_sampling_mode.startswith("sequence"):
            # all tokens of a sequence have its ratio
            log_weights = log_weights + tokens.mean_of_sequence(log_corrections)
        else:
            log_weights = log_weights + tokens.sum_of_sequence(log_corrections * tokens.mask)
    log_weights = log_weights.clamp(_LOWEST_LOG_WEIGHT, _HIGHEST_LOG_WEIGHT)
    is_positive = tokens.advantages >= 0
    exponents = torch.where(is_positive, settings.vespo_k_pos, settings.vespo_k_neg)
    decays = torch.where(is_positive, settings.vespo_lambda_pos, settings.vespo_lambda_neg)
    decays = decays.clamp(min=1e-4)
    log_phi = decays + exponents * log_weights - decays * log_weights.exp()
    return log_phi.exp().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def correction_ratios(
    old_log_probs: Tensor, sampler_log_probs: Tensor, settings: GRPOConfig
) -> Tensor:
    """Ratios of the probabilities in training and in generation, limited as ``settings`` say.

    Args:
        old_log_probs: Of the tokens of one completion in the loss, by the training pass, [tokens].
        sampler_log_probs: Of the same tokens, as the engine returned them; NaN where unknown.
        settings: Mode and limits.

    Returns:
        The ratio for each token, [tokens].
    """
    differences = torch.nan_to_num(old_log_probs - sampler_log_probs, nan=0.0)
    granularity, limit = settings.importance_sampling_mode.split("_")
    if granularity == "sequence":
        differences = differences.sum().expand_as(differences)
    ratios = differences.exp()
    lowest = settings.importance_sampling_clip_min
    highest = settings.importance_sampling_clip_max
    if limit == "truncate":
        return ratios if lowest is highest is None else ratios.clamp(lowest, highest)
    is_low = ratios < (-math.inf if lowest is None else lowest)
    is_high = ratios > (math.inf if highest is None else highest)
    return ratios.masked_fill(is_low | is_high, 0.0)


def value_losses(
    values: Tensor, old_values: Tensor, returns: Tensor, clip_range: float
) -> tuple[Tensor, Tensor]:
    """The loss of a critic at each token, and whether it was clipped, as a number; all are [tokens].

    See https://arxiv.org/abs/1707.06347 and the clipping of values in OpenAI's implementation.

    Args:
        values: Predictions, with gradients.
        old_values: Predictions before the first step on these completions.
        returns: What the critic learns to predict.
        clip_range: How far predictions move from the old ones.
    """
    clipped = torch.clamp(values, old_values - clip_range, old_values + clip_range)
    errors = (values - returns).square()
    errors_of_clipped = (clipped - returns).square()
    is_clipped = (errors_of_clipped > errors).float()
    return torch.max(errors, errors_of_clipped) / 2, is_clipped


def token_weights(
    lengths: list[int], microbatch: int, mean_tokens: float, settings: GRPOConfig
) -> list[float]:
    """The weight of the tokens of each completion, so that weighted losses sum to a mean.

    The loss of a step is ``sum(weight * loss of token) / completions``.

    Args:
        lengths: Tokens in the loss of each completion of a step, in the order of its microbatches.
        microbatch: Completions of a microbatch.
        mean_tokens: Tokens in the loss of a step, on average over the steps of a generation.
        settings: The averaging that ``loss_type`` stands for.
    """
    match settings.loss_type:
        case "grpo" | "sapo":
            return [1 / max(length, 1) for length in lengths]
        case "bnpo":
            weights: list[float] = []
            for start in range(0, len(lengths), microbatch):
                tokens = sum(lengths[start : start + microbatch])
                weights += [microbatch / max(tokens, 1)] * microbatch
            return weights
        case "dr_grpo":
            return [1 / settings.max_completion_length] * len(lengths)
        case "luspo":
            return [1.0] * len(lengths)
        case _:
            return [len(lengths) / max(mean_tokens, 1.0)] * len(lengths)
