# SPDX-License-Identifier: Apache-2.0
"""The forward step and the loss of a student."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron.bridge.checkpoint.model_io import unwrap
from megatron.bridge.training.config.blocks.objectives import DistillConfig
from megatron.bridge.training.distillation.cache import cached_targets
from megatron.bridge.training.distillation.divergence import (
    TopTokens,
    mixed_divergence,
    top_kl_divergence,
    top_tokens,
)
from megatron.bridge.training.distillation.student_teacher import WatchedLayer, pair_of, projected
from megatron.bridge.training.gpt_step import (
    LOSS_NAME,
    next_batch,
    packed_parameters,
    padding_arguments,
)
from megatron.bridge.training.state import BatchIterator, LossFunction, Run
from megatron.bridge.training.step.losses import LossReport

KL_NAME = "kl loss"
HIDDEN_NAME = "hidden loss"


class StudentStep:
    """The forward step of distillation, which runs a chunk of the student and of the teacher."""

    learns_from_teacher = True

    def __call__(
        self, run: Run, data_iterator: BatchIterator, model: MegatronModule
    ) -> tuple[Tensor, LossFunction]:
        """Run one chunk of student and teacher on the next microbatch: the next stage's tensor, and the loss function.

        On the last stage the tensor is the student's logits [batch, sequence, vocabulary shard].
        """
        config = run.config.distill
        assert config is not None, "distill is not set"
        batch = next_batch(data_iterator)
        inputs = model_inputs(batch, model)
        pair = pair_of(model)
        if pair is None:
            return model(**inputs), StudentLoss(config, batch, model, cached_targets(batch), {})
        ours, theirs = pair.run(model, inputs)
        if not unwrap(model).post_process:
            return pair.joined(ours, theirs), StudentLoss(config, batch, model, None, {})
        return ours, StudentLoss(config, batch, model, theirs, pair.take_states())


forward_step = StudentStep()


def model_inputs(batch: dict[str, Any], model: MegatronModule) -> dict[str, Any]:
    """The keyword arguments of ``model`` for a batch of ``next_batch``."""
    packed = {"packed_seq_params": packed_parameters(batch)} if "cu_seqlens" in batch else {}
    names = {
        "input_ids": "tokens",
        "position_ids": "position_ids",
        "attention_mask": "attention_mask",
    }
    inputs = {name: batch[key] for name, key in names.items()}
    return inputs | packed | padding_arguments(batch, model)


@dataclass
class StudentLoss:
    config: DistillConfig
    batch: dict[str, Any]  # labels and mask, [batch, sequence]
    model: MegatronModule  # the student's last chunk, with the projections of hidden states
    # the teacher's logits or top tokens; None if unknown, as for validation data with ``distill.cache``
    teacher: Tensor | TopTokens | None
    states: dict[
        WatchedLayer, Tensor
    ]  # hidden states of both models, [sequence of this rank, batch, width]

    def __call__(self, logits: Tensor) -> tuple[Tensor, Tensor, LossReport]:
        """The weighted sum over unmasked tokens, their number, and the report of each loss."""
        mask = self.batch["loss_mask"].float()
        tokens = mask.sum()
        total = logits.new_zeros((), dtype=torch.float32)
        sums = {}
        # first, because cross entropy may overwrite the logits
        if self.teacher is not None and self.config.kl_weight:
            sums[KL_NAME] = (self._divergence(logits, self.teacher) * mask).sum()
            total = total + self.config.kl_weight * self.config.temperature**2 * sums[KL_NAME]
        if self.states:
            sums[HIDDEN_NAME] = self._distance(mask)
            total = total + self.config.hidden_weight * sums[HIDDEN_NAME]
            sums[HIDDEN_NAME] = _whole(sums[HIDDEN_NAME].detach(), self._is_cut)
        sums[LOSS_NAME] = (self._cross_entropy(logits) * mask).sum()
        total = total + self.config.ce_weight * sums[LOSS_NAME]
        report = {
            name: torch.stack((value.detach(), tokens)).double() for name, value in sums.items()
        }
        return total, tokens.to(torch.int), report

    def _divergence(self, logits: Tensor, teacher: Tensor | TopTokens) -> Tensor:
        group: Any = parallel_state.get_tensor_model_parallel_group()
        temperature = self.config.temperature
        count = self.config.top_k
        if not isinstance(teacher, Tensor):
            return top_kl_divergence(logits, teacher, temperature, group)
        if count is None:
            return mixed_divergence(logits, teacher, self.config.jsd_beta, temperature, group)
        return top_kl_divergence(
            logits, top_tokens(teacher, count, temperature, group), temperature, group
        )

    def _cross_entropy(self, logits: Tensor) -> Tensor:
        trained = logits if self.config.ce_weight else logits.detach()
        losses: Any = tensor_parallel.vocab_parallel_cross_entropy(trained, self.batch["labels"])
        return losses.float()

    def _distance(self, mask: Tensor) -> Tensor:
        """Mean squares over width and pairs, summed over tokens (with sequence parallelism over this rank's)."""
        rows = mask.transpose(0, 1)
        if self._is_cut:
            group: Any = parallel_state.get_tensor_model_parallel_group()
            rows = rows.chunk(group.size())[group.rank()]
        pairs = self.config.hidden_layers
        distances = [
            (
                projected(self.model, ours, self.states["student", ours]).float()
                - self.states["teacher", theirs]
            )
            .square()
            .mean(-1)
            for ours, theirs in pairs.items()
        ]
        return (torch.stack(distances).mean(0) * rows).sum()

    @property
    def _is_cut(self) -> bool:
        config: Any = unwrap(self.model).config
        return config.sequence_parallel


def _whole(part: Tensor, is_cut: bool) -> Tensor:
    if is_cut:
        dist.all_reduce(part, group=parallel_state.get_tensor_model_parallel_group())
    return part
