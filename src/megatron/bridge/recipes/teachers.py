# SPDX-License-Identifier: Apache-2.0
"""Find the teacher of a distillation run, and the reference and the critic of a tuned model, without their weights."""

import copy
from pathlib import Path
from typing import Any, NamedTuple

from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.models.hf_pretrained.hub import on_this_machine
from megatron.bridge.recipes.sizes import published_size
from megatron.bridge.training.config import ConfigContainer


def teacher_of(config: ConfigContainer, world_size: int) -> GPTModelProvider | None:
    """Return the provider of the teacher or reference of a validated ``config``, or None if there is none locally."""
    from megatron.bridge.training.distillation.teacher import set_shared_settings

    blocks: dict[str, Any] = {"dpo": config.dpo, "grpo": config.grpo}
    for name, block in blocks.items():
        if block is not None and block.reference is None:
            # with adapters, the model without them is the reference; only GRPO can do without any
            compares = block.needs_reference if name == "dpo" else block.beta > 0
            has_second_model = config.peft is None and compares
            return copy.deepcopy(config.model) if has_second_model else None
    named = _named_model(config)
    if named is None:
        return None
    provider = _declared_provider(named.model, named.trust_remote_code)
    if provider is None:
        return None
    return set_shared_settings(provider, named.model, config, world_size, named.key)


def critic_of(config: ConfigContainer, world_size: int) -> ConfigContainer | None:
    """Return the config of the critic of a validated ``config``, or None if there is none on this machine."""
    from megatron.bridge.training.reinforcement.critic import critic_config, make_critic

    settings = None if config.grpo is None else config.grpo.active_critic
    if settings is None:
        return None
    provider: Any = copy.deepcopy(config.model)
    name = "checkpoint.pretrained_checkpoint"
    if settings.model is not None:
        name = settings.model
        provider = _declared_provider(name, settings.trust_remote_code)
        if provider is None:
            return None
    critic = make_critic(provider, name, config, world_size)
    return critic_config(config, settings, critic)


class _NamedModel(NamedTuple):
    key: str  # the setting that names it
    model: str
    trust_remote_code: bool


def _named_model(config: ConfigContainer) -> _NamedModel | None:
    """The second model that a setting names, if the run uses it."""
    dpo = config.dpo
    grpo = config.grpo
    distill = config.distill
    if dpo is not None and dpo.reference is not None and dpo.needs_reference:
        return _NamedModel("dpo.reference", dpo.reference, dpo.trust_remote_code)
    if grpo is not None and grpo.reference is not None and grpo.beta > 0:
        return _NamedModel("grpo.reference", grpo.reference, grpo.trust_remote_code)
    if distill is not None and distill.teacher is not None and distill.cache is None:
        return _NamedModel("distill.teacher", distill.teacher, distill.trust_remote_code)
    return None


def _declared_provider(model: str, trust_remote_code: bool) -> Any:
    """Return the provider from a directory, from the size of a recipe, or from the download cache."""
    from megatron.bridge.models.conversion.pretrained import provider_of

    if Path(model).is_dir():
        return provider_of(model, trust_remote_code)
    size = published_size(model)
    if size is not None:
        return size.provider()
    folder = on_this_machine(model)
    if folder is None:
        return None
    return provider_of(str(folder), trust_remote_code)
