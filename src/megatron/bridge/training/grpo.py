# SPDX-License-Identifier: Apache-2.0
"""Reinforcement learning: a model learns from rewards of its own completions (GRPO, PPO and their relatives)."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from megatron.core.transformer.module import MegatronModule

from megatron.bridge.models.conversion.pretrained import provider_of
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.training.callbacks.base import Callback, CallbackManager
from megatron.bridge.training.callbacks.observe.report import FinetuningReport
from megatron.bridge.training.config import ConfigContainer, Resolved
from megatron.bridge.training.distill import SameTeacher
from megatron.bridge.training.distillation.teacher import (
    identity,
    load_teacher,
    set_shared_settings,
    share_message_settings,
)
from megatron.bridge.training.finetune import check_tokenizer
from megatron.bridge.training.pretrain import pretrain
from megatron.bridge.training.reinforcement.callback import Rollouts
from megatron.bridge.training.reinforcement.critic import Critic, critic_provider
from megatron.bridge.training.reinforcement.rewards import load_rewards
from megatron.bridge.training.reinforcement.step import PolicyStep
from megatron.bridge.training.reinforcement.tools import load_tools, offer_tools
from megatron.bridge.training.setup import AnyConfig, Callbacks, container_of, resolve_run
from megatron.bridge.training.state import Run
from megatron.bridge.utils import distributed
from megatron.bridge.utils.errors import UserError


def grpo(
    config: AnyConfig,
    callbacks: Callbacks | None = None,
    reward_funcs: Sequence[Callable[..., Any]] = (),
    tools: Sequence[Callable[..., Any]] = (),
) -> Run:
    """``pretrain`` from ``checkpoint.pretrained_checkpoint`` with the loss of ``config.grpo``, or resume.

    The model generates in the layout in which it is trained. A reference, if ``grpo.beta`` is above 0, has this
    layout, too; it is not trained or saved.

    Args:
        config: The configuration. An unresolved one is resolved into a copy; the original is not modified.
        callbacks: Further callbacks.
        reward_funcs: Functions that score completions, in addition to those that ``grpo.reward_funcs`` names.
        tools: Functions that completions may call, in addition to those that ``grpo.tools`` names.

    Raises:
        UserError: There are no pretrained weights or reward functions, or ``pretrain`` refuses the config.
    """
    given = container_of(config)
    if given.grpo is None:
        raise UserError("grpo is not set: set it to a GRPOConfig, or use finetune")
    if given.checkpoint.pretrained_checkpoint is None:
        raise UserError(
            "checkpoint.pretrained_checkpoint is not set: reinforcement learning starts from a model that can "
            "answer, a Megatron checkpoint or a Hugging Face directory"
        )
    rewards = load_rewards(given.grpo, reward_funcs)
    toolbox = load_tools(given.grpo, tools)
    check_tokenizer(given)
    resolved = resolve_run(config)
    offer_tools(resolved.config, toolbox)
    settings = resolved.config.grpo
    assert settings is not None, "resolving keeps it"
    forward_step = PolicyStep()
    rollouts = Rollouts(settings, rewards, toolbox, forward_step)
    own_callbacks: list[Callback] = [rollouts]
    critic = settings.active_critic
    if critic is not None:
        provider = critic_provider(resolved.config, critic, distributed.world_size())
        resolved.config.model.register_pre_wrap_hook(
            partial(_build_critic, resolved, provider, rollouts)
        )
    name = reference_of(resolved.config)
    if name is not None:
        provider = reference_provider(resolved.config, name, distributed.world_size())
        resolved.config.model.register_pre_wrap_hook(partial(_load_reference, provider, rollouts))
        own_callbacks.append(SameTeacher(name, identity(name), key="grpo.reference"))
    return pretrain(
        resolved,
        forward_step,
        CallbackManager([*own_callbacks, *(callbacks or ()), FinetuningReport()]),
    )


def reference_of(config: ConfigContainer) -> str | None:
    """The weights of a second model; None without a reference, or where the adapters are switched off for it."""
    settings = config.grpo
    assert settings is not None, "grpo is not set"
    if settings.beta == 0 or (settings.reference is None and config.peft is not None):
        return None
    return settings.reference or config.checkpoint.pretrained_checkpoint


def reference_provider(config: ConfigContainer, name: str, world_size: int) -> GPTModelProvider:
    """The provider of the reference with the parallel sizes of ``config.model``."""
    assert config.grpo is not None, "grpo is not set"
    provider: Any = provider_of(name, config.grpo.trust_remote_code)
    provider = set_shared_settings(provider, name, config, world_size, key="grpo.reference")
    share_message_settings(provider, config)
    return provider


def _build_critic(
    resolved: Resolved[ConfigContainer],
    provider: GPTModelProvider,
    rollouts: Rollouts,
    chunks: list[MegatronModule],
) -> None:
    """Build the critic in addition to the new ``chunks`` of a model, before random states are restored."""
    rollouts.critic = Critic(resolved.config, provider, resolved.tokenizer)


def _load_reference(
    provider: GPTModelProvider, rollouts: Rollouts, chunks: list[MegatronModule]
) -> None:
    """Load the reference in addition to the new ``chunks`` of a model."""
    rollouts.reference = load_teacher(provider)
