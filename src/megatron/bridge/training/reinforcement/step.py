# SPDX-License-Identifier: Apache-2.0
"""The forward step: log-probabilities of completions, and the loss of a microbatch."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    vocab_parallel_cross_entropy,
)
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron.bridge.checkpoint.model_io import unwrap
from megatron.bridge.training.config.blocks.reinforcement import GRPOConfig
from megatron.bridge.training.distillation.step import model_inputs
from megatron.bridge.training.dpo import answer_of_token, sum_by_answer
from megatron.bridge.training.gpt_step import cut_sequences, on_device
from megatron.bridge.training.reinforcement.losses import CompletionTokens, policy_losses
from megatron.bridge.training.reinforcement.replay import RolloutReplay, SamplerMismatch
from megatron.bridge.training.state import BatchIterator, LossFunction, Run
from megatron.bridge.training.step.losses import LossReport
from megatron.bridge.training.step.trained_tokens import trained_logit_arguments, trained_places

GRPO_LOSS = "grpo loss"
BLOCK_LOGITS = 1 << 24  # logits whose entropy is computed at a time: 64 MiB in fp32


class PolicyStep:
    """The forward step of training on rewards."""

    learns_from_rewards = True

    def __init__(self) -> None:
        self.replay: RolloutReplay | None = None
        """What passes repeat of the generation; None for nothing."""
        self.mismatch = SamplerMismatch()

    def __call__(
        self, run: Run, data_iterator: BatchIterator, model: MegatronModule
    ) -> tuple[Tensor, LossFunction]:
        """Run one chunk on the next completions: the tensor for the next stage, and the function of the loss.

        On the last stage the tensor has the log-probability and the entropy of each token, see ``run_chunk``.
        """
        settings = run.config.grpo
        assert settings is not None, "grpo is not set"
        batch, output = run_chunk(next(data_iterator), model, settings.temperature, self.replay)
        return output, partial(self._compute_loss, settings, batch)

    def _compute_loss(
        self, settings: GRPOConfig, batch: dict[str, Any], scores: Tensor
    ) -> tuple[Tensor, Tensor, LossReport]:
        if "sampler_log_probs" in batch:
            sampler_log_probs = batch["sampler_log_probs"].flatten()
            self.mismatch.add(scores[0], sampler_log_probs, batch["loss_mask"].flatten())
        return policy_loss(settings, batch, scores)


def run_chunk(
    host_batch: dict[str, Any],
    model: MegatronModule,
    temperature: float,
    replay: RolloutReplay | None = None,
) -> tuple[dict[str, Any], Tensor]:
    """Run one chunk on a microbatch of ``microbatches_of``.

    This is the only place where the training pass computes log-probabilities: also those at generation and those of
    the reference.

    Args:
        host_batch: The microbatch.
        model: The chunk.
        temperature: Divides the logits; 1 with the engine's numbers.
        replay: What the pass repeats of the generation, in its context.

    Returns:
        The part of the batch of this context-parallel rank, on its device; and the output of the chunk. On the last
        stage that is fp32 [2, tokens]: log-probabilities and entropies, 0 for tokens outside of the loss.
    """
    tensors = dict(host_batch)
    prompt_lengths = tensors.pop("prompt_lengths")
    batch = cut_sequences(on_device(tensors))
    experts = batch.pop("experts", None)
    inputs = model_inputs(batch, model)
    is_exact = replay is not None and replay.is_exact
    # the engine computes the logits of all tokens
    places = None if is_exact else trained_places(model, host_batch)
    if places is not None:
        inputs |= trained_logit_arguments(places)
    with nullcontext() if replay is None else replay.microbatch(prompt_lengths, experts):
        output = model(**inputs)
    if places is not None:
        logits = output
    else:
        if not unwrap(model).post_process:
            return batch, output
        places = batch["loss_mask"].flatten().nonzero().flatten()
        logits = output.flatten(0, 1).index_select(0, places)
    labels = batch["labels"].flatten().index_select(0, places)
    scores = score_tokens(logits, labels, temperature)
    if replay is not None and replay.is_exact:
        scores = torch.stack((replay.engine_log_probs(scores[0], logits, labels), scores[1]))
    placed = scores.new_zeros(2, batch["labels"].numel())
    return batch, placed.index_copy(1, places, scores)


def score_tokens(logits: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Log-probabilities, with gradients, and entropies of tokens, fp32 [2, tokens], equal on all tensor ranks.

    Args:
        logits: This rank's shard of the vocabulary, [tokens, shard].
        labels: The tokens, [tokens].
        temperature: Divides the logits.
    """
    scaled = logits.float() / temperature
    entropies = entropies_of(scaled.detach())  # first, because cross entropy overwrites the logits
    losses: Any = vocab_parallel_cross_entropy(scaled, labels)
    return torch.stack((-losses, entropies))


@torch.no_grad()
def entropies_of(logits: Tensor) -> Tensor:
    """The entropy of each distribution in nats [tokens]; logits are this rank's shard [tokens, shard]."""
    group: Any = parallel_state.get_tensor_model_parallel_group()
    rows = max(1, BLOCK_LOGITS // logits.size(-1))
    entropies: list[Tensor] = []
    for block in logits.split(rows):
        highest = block.amax(-1, keepdim=True)
        if group.size() > 1:
            dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
        shifted = block - highest
        weights = shifted.exp()
        sums = torch.stack((weights.sum(-1), (weights * shifted).sum(-1)))
        if group.size() > 1:
            dist.all_reduce(sums, group=group)
        entropies.append(sums[0].log() - sums[1] / sums[0])
    return torch.cat(entropies)


def policy_loss(
    settings: GRPOConfig, batch: dict[str, Any], scores: Tensor
) -> tuple[Tensor, Tensor, LossReport]:
    """The weighted sum over the tokens of this rank, the number of completions, and the report.

    Context-parallel ranks hold parts of the same completions, so only the first of them counts these.
    """
    log_probs, entropies = scores
    mask = batch["loss_mask"].flatten()
    weights = batch["token_weights"].flatten()
    tokens = completion_tokens(batch)
    values = policy_losses(log_probs, tokens, settings)
    total = (values.losses * weights).sum()
    is_first = parallel_state.get_context_parallel_rank() == 0
    completions = (len(batch["cu_seqlens"]) - 1) * is_first
    count = torch.tensor(completions, dtype=torch.int, device=total.device)
    # a ratio of a completion counts once, whatever its length
    is_of_sequence = settings.importance_sampling_level == "sequence"
    shares = mask / tokens.lengths if is_of_sequence else mask
    means = {
        "entropy": (entropies, mask),
        "clipped low": (values.clipped_low, shares),
        "clipped high": (values.clipped_high, shares),
    }
    if values.kl is not None:
        means["kl"] = (values.kl, mask)
    report = {
        name: torch.stack(((value.detach() * counted).sum(), counted.sum())).double()
        for name, (value, counted) in means.items()
    }
    report[GRPO_LOSS] = torch.stack((total.detach(), count)).double()
    return total, count, report


def completion_tokens(batch: dict[str, Any]) -> CompletionTokens:
    """What the losses read of a microbatch of ``microbatches_of``, of this context-parallel rank."""
    flat = {
        name: value.flatten()
        for name, value in batch.items()
        if isinstance(value, Tensor) and name != "cu_seqlens"
    }
    sequences = answer_of_token(batch)
    group: Any = parallel_state.get_context_parallel_group()

    def sum_of_sequence(values: Tensor) -> Tensor:
        # each rank's loss reads the sums, so the gradients of all ranks are summed, too
        sums = copy_to_tensor_model_parallel_region(sum_by_answer(batch, values), group)
        return sums[sequences]

    return CompletionTokens(
        mask=flat["loss_mask"],
        lengths=flat["sequence_lengths"],
        advantages=flat["advantages"],
        sum_of_sequence=sum_of_sequence,
        old_log_probs=flat.get("old_log_probs"),
        reference_log_probs=flat.get("reference_log_probs"),
        corrections=flat.get("corrections"),
    )
