# SPDX-License-Identifier: Apache-2.0
"""The microbatches of a step: packed rows of prompts with their completions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron.bridge.data.finetuning.rows import packed_batch
from megatron.bridge.data.records.samples import Sample
from megatron.bridge.training.config.blocks.reinforcement import GRPOConfig
from megatron.bridge.training.reinforcement.losses import correction_ratios, token_weights
from megatron.bridge.training.reinforcement.rollouts import Rollout


@dataclass(frozen=True)
class BatchShape:
    """How the completions of a step become microbatches of one data-parallel rank."""

    micro_batch_size: int
    multiple: int  # each sequence is padded to a multiple of this
    padding: int  # the padding token
    rank: int  # in the data-parallel group
    ranks: int


@dataclass
class StepRollouts:
    """The completions of one step in the order of its microbatches, and where their tokens are in flat tensors."""

    rollouts: Sequence[Rollout]
    mean_tokens: float  # tokens in the loss of a step, on average over the steps of a generation

    @property
    def starts(self) -> list[int]:
        """Where the tokens of each completion begin in a flat tensor of all of them, and the end."""
        lengths = [len(rollout.tokens) for rollout in self.rollouts]
        return [0, *np.cumsum(lengths).tolist()]


def microbatches_of(
    step: StepRollouts, shape: BatchShape, settings: GRPOConfig
) -> list[dict[str, Any]]:
    """The microbatches of this data-parallel rank, on the host.

    Besides the keys of every packed batch they have, for each token [1, tokens] and 0 outside of completions:
    ``token_weights``, ``advantages``, ``sequence_lengths`` (tokens in the loss of the sequence, at least 1),
    ``places`` (of tokens in the loss, the index in a flat tensor of all completions of the step, else -1), and where
    they are known ``sampler_log_probs``, ``old_log_probs``, ``reference_log_probs``, ``corrections``, ``values`` and
    ``returns``.
    For ``RolloutReplay`` they have ``prompt_lengths``, tokens of the prompt of each sequence, and with
    ``grpo.router_replay`` ``experts`` [1, tokens, layers with experts, topk], -1 where routers choose.
    """
    lengths = [rollout.trained_tokens for rollout in step.rollouts]
    weights = token_weights(lengths, shape.micro_batch_size, step.mean_tokens, settings)
    starts = step.starts
    count = len(step.rollouts) // (shape.micro_batch_size * shape.ranks)
    batches: list[dict[str, Any]] = []
    for index in range(count):
        first = (index * shape.ranks + shape.rank) * shape.micro_batch_size
        chosen = range(first, first + shape.micro_batch_size)
        batches.append(_make_batch(step.rollouts, chosen, weights, starts, shape, settings))
    return batches


def _make_batch(
    rollouts: Sequence[Rollout],
    chosen: range,
    weights: list[float],
    starts: list[int],
    shape: BatchShape,
    settings: GRPOConfig,
) -> dict[str, Any]:
    samples = [_sample_of(rollouts[index]) for index in chosen]
    batch = packed_batch(samples, shape.padding, shape.multiple)
    bounds = batch["cu_seqlens"].tolist()
    values: dict[str, Tensor] = {
        name: torch.zeros(bounds[-1], device="cpu")
        for name in (
            "token_weights",
            "advantages",
            *_known_of_tokens(rollouts[chosen[0]], settings),
        )
    }
    experts = _unset_experts(rollouts[chosen[0]], bounds[-1], settings)
    values["sequence_lengths"] = torch.ones(bounds[-1], device="cpu")
    places = torch.full((bounds[-1],), -1, dtype=torch.int64, device="cpu")
    for bound, end, index in zip(bounds[:-1], bounds[1:], chosen, strict=True):
        rollout = rollouts[index]
        # position i predicts token i + 1
        start = bound + len(rollout.prompt_tokens) - 1
        span = slice(start, start + len(rollout.tokens))
        # also outside of completions, so that tensors of sequences can be read at any token
        values["advantages"][bound:end] = rollout.advantage
        values["sequence_lengths"][bound:end] = max(rollout.trained_tokens, 1)
        if experts is not None and rollout.experts is not None:
            experts[bound : bound + len(rollout.experts)] = rollout.experts
        if not rollout.is_trained:
            continue
        is_written = written_tokens(rollout)
        values["token_weights"][span] = weights[index] * is_written
        flat_places = torch.arange(starts[index], starts[index + 1], device="cpu")
        places[span] = torch.where(is_written, flat_places, -1)
        for name, known in _known_of_tokens(rollout, settings).items():
            values[name][span] = known
        if rollout.token_advantages is not None:
            values["advantages"][span] = rollout.token_advantages
    tensors = values | {"places": places}
    if experts is not None:
        tensors["experts"] = experts
    batch |= {name: value.unsqueeze(0) for name, value in tensors.items()}
    batch["prompt_lengths"] = [len(rollouts[index].prompt_tokens) for index in chosen]
    return batch


def _unset_experts(rollout: Rollout, tokens: int, settings: GRPOConfig) -> Tensor | None:
    """Experts for the tokens of a row, -1, which padding keeps; None without replay."""
    if not settings.router_replay or rollout.experts is None:
        return None
    return torch.full((tokens, *rollout.experts.shape[1:]), -1, dtype=torch.int16, device="cpu")


def _sample_of(rollout: Rollout) -> Sample:
    tokens = np.array([*rollout.prompt_tokens, *rollout.tokens], np.int32)
    is_in_loss = np.zeros(len(tokens), np.bool_)
    if rollout.is_trained:
        is_in_loss[len(rollout.prompt_tokens) :] = written_tokens(rollout).numpy()
    return Sample(tokens, is_in_loss)


def written_tokens(rollout: Rollout) -> Tensor:
    """Whether the model wrote each token of a completion, bool [tokens]."""
    if rollout.is_written is not None:
        return rollout.is_written
    return torch.ones(len(rollout.tokens), dtype=torch.bool, device="cpu")


def _known_of_tokens(rollout: Rollout, settings: GRPOConfig) -> dict[str, Tensor]:
    """What is known of the tokens of a completion, by the key of a batch."""
    known: dict[str, Tensor] = {}
    if settings.knows_sampler_log_probs:
        known["sampler_log_probs"] = rollout.sampler_log_probs
    if rollout.old_log_probs is not None:
        known["old_log_probs"] = rollout.old_log_probs
        if settings.importance_sampling_correction:
            known["corrections"] = correction_ratios(
                rollout.old_log_probs, rollout.sampler_log_probs, settings
            )
    if rollout.reference_log_probs is not None:
        known["reference_log_probs"] = rollout.reference_log_probs
    if rollout.values is not None and rollout.returns is not None:
        known["values"] = rollout.values
        known["returns"] = rollout.returns
    return known
