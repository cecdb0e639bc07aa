# SPDX-License-Identifier: Apache-2.0
"""The teacher of a distillation run, or the reference of preference tuning, without the network and weights."""

import copy
from pathlib import Path
from typing import Any

from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.models.hf_pretrained.hub import on_this_machine
from megatron.bridge.recipes.sizes import published_size
from megatron.bridge.training.config import ConfigContainer


def teacher_of(config: ConfigContainer, world_size: int) -> GPTModelProvider | None:
    """What runs beside the model of a validated ``config``; None if nothing does, or its config is elsewhere."""
    from megatron.bridge.training.distillation.teacher import set_shared_settings

    if config.dpo is not None:
        return _reference_of(config, world_size)
    distill = config.distill
    if distill is None or distill.teacher is None or distill.cache is not None:
        return None
    provider = _declared(distill.teacher, distill.trust_remote_code)
    return None if provider is None else set_shared_settings(provider, distill.teacher, config, world_size)


def _reference_of(config: ConfigContainer, world_size: int) -> GPTModelProvider | None:
    """The reference of preference tuning; a model that is its own reference has none."""
    from megatron.bridge.training.distillation.teacher import set_shared_settings

    assert config.dpo is not None, "dpo is not set"
    name = config.dpo.reference
    if name is None:
        return None if config.peft else copy.deepcopy(config.model)
    provider = _declared(name, config.dpo.trust_remote_code)
    return None if provider is None else set_shared_settings(provider, name, config, world_size, "dpo.reference")


def _declared(name: str, trust_remote_code: bool) -> Any:
    """The provider, from a directory, from the size of a recipe, or from the download cache."""
    from megatron.bridge.models.conversion.pretrained import provider_of

    if Path(name).is_dir():
        return provider_of(name, trust_remote_code)
    if (size := published_size(name)) is not None:
        return size.provider()
    found = on_this_machine(name)
    return None if found is None else provider_of(str(found), trust_remote_code)
