# SPDX-License-Identifier: Apache-2.0
"""Find the teacher of a distillation run, or the reference of preference tuning, without network or weights."""

import copy
from pathlib import Path
from typing import Any

from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.models.hf_pretrained.hub import on_this_machine
from megatron.bridge.recipes.sizes import published_size
from megatron.bridge.training.config import ConfigContainer


def teacher_of(config: ConfigContainer, world_size: int) -> GPTModelProvider | None:
    """Return the provider of the teacher or reference of a validated ``config``, or None if there is none locally."""
    from megatron.bridge.training.distillation.teacher import set_shared_settings

    if config.dpo is not None:
        if config.dpo.reference is None:
            if config.peft is not None:  # the model without its adapters is the reference
                return None
            return copy.deepcopy(config.model)
        key = "dpo.reference"
        model = config.dpo.reference
        trust_remote_code = config.dpo.trust_remote_code
    elif config.distill is not None:
        if config.distill.teacher is None or config.distill.cache is not None:
            return None
        key = "distill.teacher"
        model = config.distill.teacher
        trust_remote_code = config.distill.trust_remote_code
    else:
        return None
    provider = _declared_provider(model, trust_remote_code)
    if provider is None:
        return None
    return set_shared_settings(provider, model, config, world_size, key)


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
