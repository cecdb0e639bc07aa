# SPDX-License-Identifier: Apache-2.0
"""Direct preference optimization: train a model to prefer one of two answers.

Here are the forward step, the losses of answers, and the reference that they are measured against: a second model, or
the trained model with its adapters switched off.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron.bridge.backends.attention.block_mask import host_values
from megatron.bridge.checkpoint.model_io import unwrap
from megatron.bridge.data.finetuning.packing import cut_for_rank
from megatron.bridge.models.chunk_info import chunk_info, evaluation_mode
from megatron.bridge.models.conversion.engine import exchange
from megatron.bridge.models.conversion.pretrained import provider_of
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.training.callbacks.base import Callback, CallbackManager
from megatron.bridge.training.callbacks.observe.report import FinetuningReport
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.config.blocks.objectives import DPOConfig
from megatron.bridge.training.distill import SameTeacher
from megatron.bridge.training.distillation import student_teacher
from megatron.bridge.training.distillation.step import model_inputs
from megatron.bridge.training.distillation.teacher import (
    identity,
    load_teacher,
    set_shared_settings,
)
from megatron.bridge.training.finetune import check_tokenizer
from megatron.bridge.training.gpt_step import next_batch
from megatron.bridge.training.pretrain import pretrain
from megatron.bridge.training.setup import AnyConfig, Callbacks, container_of, resolve_run
from megatron.bridge.training.state import BatchIterator, LossFunction, Run
from megatron.bridge.training.step.losses import LossReport
from megatron.bridge.utils import distributed
from megatron.bridge.utils.errors import UserError

DPO_LOSS = "dpo loss"
KTO_LOSS = "kto loss"
USE_MEANS = ("ipo", "simpo", "orpo")
"""Losses of log-probabilities that are means over tokens instead of sums."""
LogProbs = tuple[Tensor, Tensor]  # of the chosen and of the rejected answers, each [pairs]


def pair_losses(
    policy: LogProbs, reference: LogProbs | None, settings: DPOConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of each pair, and the rewards ``beta (log p - log r)`` of both answers, each [pairs].

    Log-probabilities are sums over tokens, or means for the losses in ``USE_MEANS``. ``DPOConfig`` has the formulas.
    Without a reference, ``log r`` is 0.
    """
    if reference is None:
        chosen, rejected = policy
        losses = _reference_free_losses(chosen, rejected, settings)
        return losses, settings.beta * chosen.detach(), settings.beta * rejected.detach()
    chosen, rejected = (
        policy_sum - reference_sum
        for policy_sum, reference_sum in zip(policy, reference, strict=True)
    )
    losses = _losses(chosen - rejected, settings)
    return losses, settings.beta * chosen.detach(), settings.beta * rejected.detach()


def _reference_free_losses(chosen: Tensor, rejected: Tensor, settings: DPOConfig) -> Tensor:
    beta = settings.beta
    margin = chosen - rejected
    if settings.loss_type == "orpo":
        log_odds = margin - log_one_minus_exp(chosen) + log_one_minus_exp(rejected)
        return -beta * F.logsigmoid(log_odds)
    if settings.loss_type == "simpo":
        margin = margin - settings.simpo_gamma / beta
    return smoothed_losses(beta * margin, settings.label_smoothing)


def smoothed_losses(logits: Tensor, smoothing: float) -> Tensor:
    """The cross-entropy of choosing the chosen answer, if answers are swapped with the probability ``smoothing``."""
    return -F.logsigmoid(logits) * (1 - smoothing) - F.logsigmoid(-logits) * smoothing


def log_one_minus_exp(values: Tensor) -> Tensor:
    """``log(1 - exp(values))`` of negative values, exact near 0 and far from it."""
    is_near_zero = values > -math.log(2)
    # the branch that is not used must not have an infinite gradient
    near = torch.where(is_near_zero, values, -1.0).expm1().neg().log()
    far = torch.where(is_near_zero, -1.0, values).exp().neg().log1p()
    return torch.where(is_near_zero, near, far)


def _losses(margin: Tensor, settings: DPOConfig) -> Tensor:
    beta = settings.beta
    match settings.loss_type:
        case "sigmoid":
            return smoothed_losses(beta * margin, settings.label_smoothing)
        case "ipo":
            return (margin - 1 / (2 * beta)).square()
        case "hinge":
            return torch.relu(1 - beta * margin)
        case _:
            raise AssertionError(f"{settings.loss_type} is no loss of pairs with a reference")


def kto_losses(ratios: Tensor, desirable: Tensor, kl: Tensor, settings: DPOConfig) -> Tensor:
    """The loss of each answer, [answers]; see ``DPOConfig`` for the formula.

    ``ratios`` are ``log p - log r``, [answers], ``desirable`` is bool, [answers], and ``kl`` the estimate ``z0``.
    """
    gain = settings.beta * (ratios - kl)
    return torch.where(
        desirable,
        settings.desirable_weight * torch.sigmoid(-gain),
        settings.undesirable_weight * torch.sigmoid(gain),
    )


class PreferenceStep:
    """The forward step of preference tuning, which runs a chunk of the trained model and of the reference."""

    learns_preferences = True

    def __call__(
        self, run: Run, data_iterator: BatchIterator, model: MegatronModule
    ) -> tuple[Tensor, LossFunction]:
        """Run one chunk of both models on the next pairs: the tensor for the next stage, and the function of the loss.

        On the last stage the tensor is the loss of each token, [1, tokens of this context-parallel rank].
        """
        assert run.config.dpo is not None, "dpo is not set"
        batch = next_batch(data_iterator)
        if not run.config.dpo.needs_reference:
            output = model(**model_inputs(batch, model), labels=batch["labels"])
            return output, PreferenceLoss(run.config.dpo, batch, None)
        pair = student_teacher.pair_of(model)
        assert pair is not None, "no reference is attached to the model: call training.dpo.dpo"
        policy_output, reference_output = pair.run(
            model, {**model_inputs(batch, model), "labels": batch["labels"]}
        )
        kind = KTOLoss if run.config.dpo.loss_type == "kto" else PreferenceLoss
        loss = kind(run.config.dpo, batch, reference_output)
        return (
            policy_output
            if unwrap(model).post_process
            else pair.joined(policy_output, reference_output)
        ), loss


forward_step = PreferenceStep()


@dataclass
class PreferenceLoss:
    settings: DPOConfig
    batch: dict[
        str, Any
    ]  # rows of ``PairRows``: an answer that is chosen, the one that is rejected, and so on
    reference: Tensor | None  # the reference's loss of each token; None without a reference

    def __call__(self, token_losses: Tensor) -> tuple[Tensor, Tensor, LossReport]:
        """The sum over pairs, the number of pairs, and the report."""
        policy = self._log_probs(token_losses)
        reference = None if self.reference is None else self._log_probs(self.reference)
        losses, chosen, rejected = pair_losses(policy, reference, self.settings)
        if self.settings.likelihood_weight:
            mask = self.batch["loss_mask"].view(-1) > 0
            losses = losses + self.settings.likelihood_weight * self._nll(token_losses, mask)
        if self.settings.loss_type == "orpo":
            losses = losses + self._nll(token_losses, ~self.batch["padding_mask"].view(-1))
        report = {
            DPO_LOSS: losses,
            "chosen reward": chosen,
            "rejected reward": rejected,
            "reward margin": chosen - rejected,
            "reward accuracy": (chosen > rejected).float(),
        }
        return sum_of_pairs(losses, report)

    def _nll(self, token_losses: Tensor, mask: Tensor) -> Tensor:
        """The negative log-likelihood of chosen texts [pairs]; its mean is that of the tokens of the microbatch."""
        masked = token_losses.view(-1).float() * mask
        sums = sum_by_answer(self.batch, masked)[0::2]
        counts = sum_by_answer(self.batch, mask.float())[0::2]
        return sums * len(sums) / counts.sum()

    def _log_probs(self, token_losses: Tensor) -> LogProbs:
        """Sums over the trained tokens of each answer, or means."""
        mask = self.batch["loss_mask"].view(-1).float()
        sums = sum_by_answer(self.batch, -token_losses.view(-1).float() * mask)
        if self.settings.loss_type in USE_MEANS:
            sums = sums / sum_by_answer(self.batch, mask)
        return sums[0::2], sums[1::2]


class KTOLoss(PreferenceLoss):
    """The loss of the answers of one microbatch, whose rows are those of ``LabeledRows``."""

    def __call__(self, token_losses: Tensor) -> tuple[Tensor, Tensor, LossReport]:
        assert self.reference is not None, "kto has a reference"
        policy, reference = (self._log_probs(losses) for losses in (token_losses, self.reference))
        ratios, mismatched = (
            policy_sum - reference_sum
            for policy_sum, reference_sum in zip(policy, reference, strict=True)
        )
        desirable = sum_by_answer(self.batch, self.batch["desirable"].view(-1))[0::2] > 0
        kl = kl_estimate(mismatched.detach())
        losses = kto_losses(ratios, desirable, kl, self.settings)
        rewards = self.settings.beta * ratios.detach()
        every = torch.ones_like(ratios)
        values = {
            KTO_LOSS: (losses.detach(), every),
            "kl": (kl, every),
            "chosen reward": (rewards, desirable),
            "rejected reward": (rewards, ~desirable),
        }
        is_first: bool = parallel_state.get_context_parallel_rank() == 0
        report = {
            name: torch.stack(((value * counted).sum(), counted.sum())).double() * is_first
            for name, (value, counted) in values.items()
        }
        return losses.sum(), report[KTO_LOSS][1].int(), report


def sum_of_pairs(losses: Tensor, reported: dict[str, Tensor]) -> tuple[Tensor, Tensor, LossReport]:
    """The sum over pairs, the number of pairs, and the report of values [pairs].

    Context-parallel ranks compute the same losses, so only the first of them counts pairs and reports.
    """
    is_first = parallel_state.get_context_parallel_rank() == 0
    pairs = torch.tensor(len(losses) * is_first, dtype=torch.int, device=losses.device)
    sums = {name: value.detach().sum() * is_first for name, value in reported.items()}
    return (
        losses.sum(),
        pairs,
        {name: torch.stack((value, pairs)).double() for name, value in sums.items()},
    )


def kl_estimate(ratios: Tensor) -> Tensor:
    """The mean of ``ratios`` [answers] over all data-parallel ranks, and at least 0."""
    total = torch.stack((ratios.sum(), ratios.new_tensor(len(ratios))))
    replicas: Any = parallel_state.get_data_parallel_group()
    if replicas.size() > 1:
        dist.all_reduce(total, group=replicas)
    return (total[0] / total[1]).clamp(min=0)


def sum_by_answer(batch: dict[str, Any], values: Tensor) -> Tensor:
    """Sums of ``values`` [tokens, ...] over each answer and the context-parallel ranks, with gradients for each."""
    answers = len(batch["cu_seqlens"]) - 1
    sums = values.new_zeros(answers, *values.shape[1:]).index_add(0, answer_of_token(batch), values)
    return reduce_from_tensor_model_parallel_region(
        sums, parallel_state.get_context_parallel_group()
    )


def answer_of_token(batch: dict[str, Any]) -> Tensor:
    """The index of the answer that each token of this rank belongs to, [tokens]."""
    bounds: Tensor = batch["cu_seqlens"]
    group: Any = parallel_state.get_context_parallel_group()
    positions = torch.arange(batch["tokens"].numel() * group.size(), device=bounds.device)
    if group.size() > 1:
        places = cut_for_rank(np.array(host_values(bounds)), group.rank(), group.size())
        positions = torch.from_numpy(places).to(bounds.device)
    return torch.searchsorted(bounds[1:], positions, right=True)


@dataclass
class AdaptersOff(student_teacher.ChunkPair):
    """A chunk that is its own reference."""

    peft: LoRA | None = None

    def run(self, model: MegatronModule, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """The outputs of the chunk with and without its adapters."""
        received: Tensor | None = student_teacher.bare_decoder(self.student).input_tensor
        parts = (
            (None, None)
            if received is None
            else [part.contiguous() for part in received.chunk(2, dim=-1)]
        )
        if parts[0] is not None:
            student_teacher.set_input(self.student, parts[0])
        adapted = model(**inputs)
        if parts[1] is not None:
            student_teacher.set_input(self.student, parts[1].detach())
        return adapted, self._without_adapters(inputs)

    def _without_adapters(self, inputs: dict[str, Any]) -> Tensor:
        bare = unwrap(self.student)
        assert self.peft is not None, "there are no adapters to switch off"
        # no dropout, and no statistics of a router
        with torch.no_grad(), evaluation_mode([bare]), self.peft.disable_adapter(bare):
            return bare(**inputs)


def reference_of(config: ConfigContainer) -> str | None:
    """The weights of the reference; None where the trained model is its own reference, or where none is needed."""
    assert config.dpo is not None, "dpo is not set"
    if not config.dpo.needs_reference:
        return None
    if config.dpo.reference is None and config.peft is not None:
        return None
    return config.dpo.reference or config.checkpoint.pretrained_checkpoint


def reference_provider(config: ConfigContainer, name: str, world_size: int) -> GPTModelProvider:
    """The provider of the reference with the parallel sizes of ``config.model``."""
    assert config.dpo is not None, "dpo is not set"
    provider = provider_of(name, config.dpo.trust_remote_code)
    return set_shared_settings(provider, name, config, world_size, key="dpo.reference")


def attach_model(provider: GPTModelProvider, chunks: list[MegatronModule]) -> None:
    """Load the reference in addition to the new ``chunks`` of a model."""
    student_teacher.bind(chunks, load_teacher(provider), {})


def attach_base(config: ConfigContainer, chunks: list[MegatronModule]) -> None:
    """Make each new chunk, without the adapters that it will have, its own reference."""
    for chunk in chunks:
        size = student_teacher.width(chunk)
        peft = cast(LoRA, config.peft)
        sizes = {"student": size, "teacher": size}
        chunk_info(chunk).student_teacher = AdaptersOff(
            chunk, chunk, (), {}, exchange.stage(), cast(Any, sizes), peft=peft
        )


def dpo(config: AnyConfig, callbacks: Callbacks | None = None) -> Run:
    """``pretrain`` from ``checkpoint.pretrained_checkpoint`` with the loss of ``config.dpo``, or resume.

    The reference runs with the same parallel sizes as the model. It is not trained or saved.

    An unresolved config is resolved into a copy.
    """
    given = container_of(config)
    if given.dpo is None:
        raise UserError("dpo is not set: set it to a DPOConfig, or use finetune")
    if given.checkpoint.pretrained_checkpoint is None:
        raise UserError(
            "checkpoint.pretrained_checkpoint is not set: preference tuning starts from a fine-tuned model, a "
            "Megatron checkpoint or a Hugging Face directory"
        )
    check_tokenizer(given)
    resolved = resolve_run(config)
    name = reference_of(resolved.config)
    own_callbacks = list[Callback]()
    model = resolved.config.model
    if name is not None:
        provider = reference_provider(resolved.config, name, distributed.world_size())
        model.register_pre_wrap_hook(partial(attach_model, provider))
        own_callbacks.append(SameTeacher(name, identity(name), key="dpo.reference"))
    elif given.dpo.needs_reference:
        model.register_pre_wrap_hook(partial(attach_base, resolved.config))
    return pretrain(
        resolved,
        forward_step,
        CallbackManager([*own_callbacks, *(callbacks or ()), FinetuningReport()]),
    )
