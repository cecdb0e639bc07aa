# SPDX-License-Identifier: Apache-2.0
"""The forward step and the loss of preference tuning."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron.bridge.backends.attention.block_mask import host_values
from megatron.bridge.checkpoint.model_io import unwrap
from megatron.bridge.data.finetuning.packing import cut_for_rank
from megatron.bridge.training.config.blocks.dpo import DPOConfig
from megatron.bridge.training.distillation.step import model_inputs
from megatron.bridge.training.distillation.student_teacher import pair_of
from megatron.bridge.training.gpt_step import next_batch
from megatron.bridge.training.preference.losses import LogProbs, kto_losses, pair_losses
from megatron.bridge.training.state import BatchIterator, LossFunction, Run
from megatron.bridge.training.step.losses import LossReport

DPO_LOSS = "dpo loss"
KTO_LOSS = "kto loss"


class PreferenceStep:
    """The forward step of preference tuning, which runs a chunk of the trained model and of the reference."""

    learns_preferences = True

    def __call__(self, run: Run, data_iterator: BatchIterator, model: MegatronModule) -> tuple[Tensor, LossFunction]:
        """Run one chunk of both models on the next pairs.

        Returns:
            The tensor for the next stage (on the last stage the loss of each token, [1, tokens of this
            context-parallel rank]) and the function that computes the loss of the pairs from it.
        """
        assert run.config.dpo is not None, "dpo is not set"
        batch, pair = next_batch(data_iterator), pair_of(model)
        assert pair is not None, "no reference is attached to the model: call training.dpo.dpo"
        ours, theirs = pair.run(model, {**model_inputs(batch), "labels": batch["labels"]})
        kind = KTOLoss if run.config.dpo.loss_type == "kto" else PreferenceLoss
        loss = kind(run.config.dpo, batch, theirs)
        return (ours if unwrap(model).post_process else pair.joined(ours, theirs)), loss


forward_step = PreferenceStep()


@dataclass
class PreferenceLoss:
    """The loss of the pairs of one microbatch."""

    settings: DPOConfig
    batch: dict[str, Any]  # rows of ``PairRows``: an answer that is chosen, the one that is rejected, and so on
    reference: Tensor  # the reference's loss of each token

    def __call__(self, token_losses: Tensor) -> tuple[Tensor, Tensor, LossReport]:
        """The sum over pairs, the number of pairs, and the report.

        Context-parallel ranks compute the same losses, so only the first of them counts pairs and reports.
        """
        policy, reference = (self._log_probs(losses) for losses in (token_losses, self.reference))
        losses, chosen, rejected = pair_losses(policy, reference, self.settings)
        is_first: bool = parallel_state.get_context_parallel_rank() == 0
        pairs = torch.tensor(len(losses) * is_first, dtype=torch.int, device=losses.device)
        found = {
            DPO_LOSS: losses.detach(),
            "chosen reward": chosen,
            "rejected reward": rejected,
            "reward margin": chosen - rejected,
            "reward accuracy": (chosen > rejected).float(),
        }
        report = {name: torch.stack((value.sum() * is_first, pairs)).double() for name, value in found.items()}
        return losses.sum(), pairs, report

    def _log_probs(self, token_losses: Tensor) -> LogProbs:
        """Sums over the trained tokens of each answer; for ``ipo`` means."""
        mask = self.batch["loss_mask"].view(-1).float()
        found = sum_by_answer(self.batch, -token_losses.view(-1).float() * mask)
        if self.settings.loss_type == "ipo":
            found = found / sum_by_answer(self.batch, mask)
        return LogProbs(found[0::2], found[1::2])


class KTOLoss(PreferenceLoss):
    """The loss of the answers of one microbatch, whose rows are those of ``LabeledRows``."""

    def __call__(self, token_losses: Tensor) -> tuple[Tensor, Tensor, LossReport]:
        policy, reference = (self._log_probs(losses) for losses in (token_losses, self.reference))
        ratios, mismatched = (ours - theirs for ours, theirs in zip(policy, reference, strict=True))
        desirable = sum_by_answer(self.batch, self.batch["desirable"].view(-1))[0::2] > 0
        kl = kl_estimate(mismatched.detach())
        losses = kto_losses(ratios, desirable, kl, self.settings)
        rewards, every = self.settings.beta * ratios.detach(), torch.ones_like(ratios)
        found = {
            KTO_LOSS: (losses.detach(), every),
            "kl": (kl, every),
            "chosen reward": (rewards, desirable),
            "rejected reward": (rewards, ~desirable),
        }
        is_first: bool = parallel_state.get_context_parallel_rank() == 0
        report = {
            name: torch.stack(((value * counted).sum(), counted.sum())).double() * is_first
            for name, (value, counted) in found.items()
        }
        return losses.sum(), report[KTO_LOSS][1].int(), report


def kl_estimate(ratios: Tensor) -> Tensor:
    """The mean of ``ratios`` [answers] over all data-parallel ranks, and at least 0."""
    total = torch.stack((ratios.sum(), ratios.new_tensor(len(ratios))))
    replicas: Any = parallel_state.get_data_parallel_group()
    if replicas.size() > 1:
        dist.all_reduce(total, group=replicas)
    return (total[0] / total[1]).clamp(min=0)


def sum_by_answer(batch: dict[str, Any], values: Tensor) -> Tensor:
    """Sums of ``values`` [tokens, ...] over each answer, on all context-parallel ranks.

    Each rank gets the gradient of its tokens.
    """
    answers = len(batch["cu_seqlens"]) - 1
    sums = values.new_zeros(answers, *values.shape[1:]).index_add(0, answer_of_token(batch), values)
    return reduce_from_tensor_model_parallel_region(sums, parallel_state.get_context_parallel_group())


def answer_of_token(batch: dict[str, Any]) -> Tensor:
    """The index of the answer that each token of this rank belongs to, [tokens]."""
    bounds: Tensor = batch["cu_seqlens"]
    group: Any = parallel_state.get_context_parallel_group()
    positions = torch.arange(batch["tokens"].numel() * group.size(), device=bounds.device)
    if group.size() > 1:
        places = cut_for_rank(np.array(host_values(bounds)), group.rank(), group.size())
        positions = torch.from_numpy(places).to(bounds.device)
    return torch.searchsorted(bounds[1:], positions, right=True)
