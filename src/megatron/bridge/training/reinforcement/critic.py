# SPDX-License-Identifier: Apache-2.0
"""The critic of PPO: a second model with its own optimizer, trained and saved together with the policy."""

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron.bridge.checkpoint import paths, verification
from megatron.bridge.checkpoint.collective import on_first_rank
from megatron.bridge.checkpoint.model_io import unwrap
from megatron.bridge.models.conversion.pretrained import provider_of
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.training.callbacks.base import CallbackManager
from megatron.bridge.training.checkpointing import save_load
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.config.blocks.reinforcement import CriticConfig, GRPOConfig
from megatron.bridge.training.distillation.step import model_inputs
from megatron.bridge.training.distillation.teacher import (
    set_shared_settings,
    share_message_settings,
)
from megatron.bridge.training.gpt_step import cut_sequences, on_device
from megatron.bridge.training.loop import train_step
from megatron.bridge.training.optim.optimizer import build_optimizer
from megatron.bridge.training.optim.scheduler import build_scheduler
from megatron.bridge.training.reinforcement.advantages import (
    generalized_advantages,
    standardize,
)
from megatron.bridge.training.reinforcement.batches import written_tokens
from megatron.bridge.training.reinforcement.losses import kl_estimates, value_losses
from megatron.bridge.training.reinforcement.rollouts import Rollout
from megatron.bridge.training.reinforcement.scoring import score_tokens_of_step
from megatron.bridge.training.setup import build_model, connect
from megatron.bridge.training.state import BatchIterator, LossFunction, Run
from megatron.bridge.training.step.losses import LossReport
from megatron.bridge.training.step.refilled_batches import RefilledBatches
from megatron.bridge.utils.config.origins import Origins
from megatron.bridge.utils.console import print_rank_0
from megatron.bridge.utils.errors import UserError

FOLDER = "critic"
"""Folder of the critic's checkpoints in those of the run."""
VALUE_LOSS = "value loss"


class Critic:
    """Predicts the reward of completions at each token, and learns from their returns.

    Args:
        config: The resolved config of the policy.
        provider: The model, from ``critic_provider``.
        tokenizer: The tokenizer of the policy.
    """

    def __init__(self, config: ConfigContainer, provider: GPTModelProvider, tokenizer: Any) -> None:
        assert config.grpo is not None, "grpo is not set"
        settings = config.grpo.active_critic
        assert settings is not None, "a critic belongs to advantage_estimator=gae"
        self._settings = settings
        own_config = critic_config(config, settings, provider)
        model = build_model(own_config)
        optimizer = build_optimizer(
            own_config.optimizer, model, own_config.dist.use_gloo_process_groups
        )
        connect(model, optimizer, own_config.ddp, own_config.dist.align_grad_reduce)
        self._weight = 0.0  # of the loss of a token in the current step
        self.run = Run(
            config=own_config,
            origins=Origins({}),
            model=model,
            optimizer=optimizer,
            scheduler=build_scheduler(own_config, optimizer),
            tokenizer=tokenizer,
            forward_step=self._forward_step,
            callbacks=CallbackManager(),
        )
        self._batches = [RefilledBatches() for _ in model]
        self.run.train_batches = list(self._batches)

    def join(self, policy: Run) -> None:
        """Continue where ``policy`` does, and be saved with it from now on."""
        self.run.progress = policy.progress
        policy.companions.append(self.run)
        if policy.progress.step == 0:
            return  # it was built with the weights that it starts from
        directory = on_first_rank(lambda: saved_critic(policy.config, policy.progress.step))
        verification.verify(directory, policy.config.checkpoint.verify)
        save_load.resume(self.run, directory)
        print_rank_0(f"critic: resumed from {directory}")

    def predict_values(self, batches: Sequence[dict[str, Any]], tokens: int) -> Tensor:
        """Values of the tokens of a step, fp32 [tokens], equal on all ranks; see ``score_tokens_of_step``."""
        return score_tokens_of_step(self.run, self.run.model, batches, tokens, _run_chunk)

    def train(self, batches: Sequence[dict[str, Any]], mean_tokens: float) -> dict[str, Tensor]:
        """Make one optimizer step.

        Args:
            batches: The microbatches of this rank, with ``values`` and ``returns``.
            mean_tokens: Tokens in the loss of a step, on average over the steps of a generation.

        Returns:
            Means over the step, by name, equal on all ranks.
        """
        self._weight = self.run.batch_size / max(mean_tokens, 1.0)
        for iterator in self._batches:
            iterator.refill(batches)
        return train_step(self.run).loss_dict

    def _forward_step(
        self, data_iterator: BatchIterator, model: MegatronModule
    ) -> tuple[Tensor, LossFunction]:
        batch, output = _run_chunk(next(data_iterator), model)

        def compute_loss(values: Tensor) -> tuple[Tensor, Tensor, LossReport]:
            return self._compute_loss(batch, values)

        return output, compute_loss

    def _compute_loss(
        self, batch: dict[str, Any], values: Tensor
    ) -> tuple[Tensor, Tensor, LossReport]:
        """The weighted sum over the tokens of this rank, the number of completions, and the report."""
        mask = batch["loss_mask"].flatten()
        old_values = batch["values"].flatten()
        returns = batch["returns"].flatten()
        losses, is_clipped = value_losses(
            values, old_values, returns, self._settings.cliprange_value
        )
        # a product with 0 keeps the graph of a rank without a token in the loss
        total = (losses * mask).sum() * self._weight
        # context-parallel ranks hold parts of the same completions
        is_first = parallel_state.get_context_parallel_rank() == 0
        completions = (len(batch["cu_seqlens"]) - 1) * is_first
        count = torch.tensor(completions, dtype=torch.int, device=values.device)
        means = {VALUE_LOSS: losses, "clipped values": is_clipped, "value": values}
        report = {
            name: torch.stack(((value.detach() * mask).sum(), mask.sum())).double()
            for name, value in means.items()
        }
        return total, count, report


def _run_chunk(host_batch: dict[str, Any], model: MegatronModule) -> tuple[dict[str, Any], Tensor]:
    """Run a chunk of the critic on a microbatch of ``microbatches_of``.

    Returns:
        The batch of this context-parallel rank, on its device; and on the last stage fp32 values [tokens].
    """
    tensors = dict(host_batch)
    del tensors["prompt_lengths"]
    batch = cut_sequences(on_device(tensors))
    batch.pop("experts", None)
    output = model(**model_inputs(batch, model))
    if unwrap(model).post_process:
        output = output.flatten().float()
    return batch, output


def critic_provider(
    config: ConfigContainer, settings: CriticConfig, world_size: int
) -> GPTModelProvider:
    """The model of the critic with the parallel sizes of ``config.model``; building it loads the weights."""
    name = settings.model or config.checkpoint.pretrained_checkpoint
    assert name is not None, "reinforcement learning starts from a model"
    provider = provider_of(name, settings.trust_remote_code)
    return make_critic(provider, name, config, world_size)


def make_critic(
    provider: Any, name: str, config: ConfigContainer, world_size: int
) -> GPTModelProvider:
    """Give ``provider`` a head with one output, if it has none, and the settings that it shares with the policy.

    Args:
        provider: The model called ``name``.
        name: Its name in messages.
        config: The resolved config of the policy.
        world_size: Processes of the run.

    Raises:
        UserError: It is no language model or classifier with one output, or does not fit the layout.
    """
    if provider.head is None:
        provider.head = "sequence_classification"
        provider.num_labels = 1
        provider.mtp_num_layers = None  # its layers predict tokens
    if provider.head != "sequence_classification" or provider.num_labels != 1:
        raise UserError(
            f"grpo.critic.model={name} has the head {provider.head} with {provider.num_labels} outputs: use a "
            "language model, or a sequence classifier with one output"
        )
    provider = set_shared_settings(provider, name, config, world_size, key="grpo.critic.model")
    share_message_settings(provider, config)
    return provider


def critic_config(
    config: ConfigContainer, settings: CriticConfig, provider: GPTModelProvider
) -> ConfigContainer:
    """The config of the critic: that of the policy with another model, another learning rate and another folder."""
    optimizer = copy.copy(config.optimizer)
    if settings.lr is not None:
        scale = settings.lr / config.optimizer.lr if config.optimizer.lr else 1.0
        optimizer.lr = settings.lr
        if optimizer.min_lr is not None:
            optimizer.min_lr = optimizer.min_lr * scale
    checkpoint = copy.copy(config.checkpoint)
    checkpoint.save = None if checkpoint.save is None else str(Path(checkpoint.save) / FOLDER)
    checkpoint.load = None
    checkpoint.pretrained_checkpoint = settings.model or checkpoint.pretrained_checkpoint
    checkpoint.also_save_hf_checkpoint = False
    if checkpoint.most_recent_k > 0:
        # it is saved first: if the run is killed then, the policy's newest checkpoint is one step older
        checkpoint.most_recent_k += 1
    return replace(
        config,
        model=provider,
        optimizer=optimizer,
        checkpoint=checkpoint,
        train=replace(config.train, frozen=[]),
        grpo=None,
        peft=None,
    )


def saved_critic(config: ConfigContainer, step: int) -> Path:
    """The checkpoint of the critic that was saved with that of the policy at ``step``.

    Raises:
        UserError: There is none.
    """
    folders: list[Path] = []
    if config.checkpoint.save is not None:
        folders.append(Path(config.checkpoint.save))
    if config.checkpoint.load is not None:
        load = Path(config.checkpoint.load)
        folders += [load, load.parent]  # a run's folder, or one of its checkpoints
    candidates = [paths.iteration_dir(folder / FOLDER, step) for folder in folders]
    for candidate in candidates:
        if candidate.is_dir():
            return candidate
    listed = ", ".join(str(candidate) for candidate in candidates)
    raise UserError(
        f"the policy resumes at step {step}, and there is no checkpoint of its critic in {listed}: set "
        "checkpoint.finetune=true to start a new run from the policy's weights, or another "
        "grpo.advantage_estimator than gae"
    )


def set_advantages(rollouts: Sequence[Rollout], settings: GRPOConfig) -> dict[str, float]:
    """Set the advantages and the returns of all tokens of a generation.

    Args:
        rollouts: All completions of the generation, with the ``values`` of the critic and, for a KL divergence in
            the reward, with the log-probabilities of the model and of the reference.
        settings: The critic, and the estimate of the divergence.

    Returns:
        What is logged of the generation, by name.
    """
    critic = settings.active_critic
    assert critic is not None, "a critic belongs to advantage_estimator=gae"
    trained = [rollout for rollout in rollouts if rollout.is_trained]
    masks = [written_tokens(rollout) for rollout in trained]
    advantages: list[Tensor] = []
    returns: list[Tensor] = []
    values: list[Tensor] = []
    for rollout, mask in zip(trained, masks, strict=True):
        assert rollout.values is not None, "the critic has predicted values"
        values_of_rollout = rollout.values[mask]
        advantages_of_rollout, returns_of_rollout = generalized_advantages(
            _rewards_of_tokens(rollout, settings)[mask],
            values_of_rollout,
            critic.gamma,
            critic.lam,
        )
        advantages.append(advantages_of_rollout)
        returns.append(returns_of_rollout)
        values.append(values_of_rollout)
    for rollout in rollouts:
        rollout.token_advantages = torch.zeros(len(rollout.tokens), device="cpu")
        rollout.returns = torch.zeros(len(rollout.tokens), device="cpu")
    if not trained:
        return {"explained variance": math.nan}
    lengths = [len(part) for part in advantages]
    standardized = standardize(torch.cat(advantages)).split(lengths)
    for rollout, mask, advantage, return_of_token in zip(
        trained, masks, standardized, returns, strict=True
    ):
        assert rollout.token_advantages is not None, "set above"
        assert rollout.returns is not None, "set above"
        rollout.token_advantages[mask] = advantage
        rollout.returns[mask] = return_of_token
    all_returns = torch.cat(returns)
    unexplained = (all_returns - torch.cat(values)).var() / all_returns.var()
    return {"explained variance": 1 - unexplained.item()}


def _rewards_of_tokens(rollout: Rollout, settings: GRPOConfig) -> Tensor:
    """The reward of each token of a completion: of the last one that the model wrote, and minus the divergence."""
    rewards = torch.zeros(len(rollout.tokens), device="cpu")
    if settings.has_kl_in_reward:
        assert rollout.old_log_probs is not None, "scored before"
        assert rollout.reference_log_probs is not None, "scored before"
        divergences = kl_estimates(
            rollout.old_log_probs, rollout.reference_log_probs, settings.kl_estimator
        )
        rewards -= settings.beta * divergences
    last_written = int(written_tokens(rollout).nonzero()[-1])
    rewards[last_written] += rollout.reward
    return rewards
