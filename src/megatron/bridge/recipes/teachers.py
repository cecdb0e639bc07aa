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
        name, key, trusts = config.dpo.reference, "dpo.reference", config.dpo.trust_remote_code
        if name is None:  # with adapters, the model without them is the reference
            return None if config.peft else copy.deepcopy(config.model)
    elif (
        config.distill is not None
        and config.distill.teacher is not None
        and config.distill.cache is None
    ):
        name, key, trusts = (
            config.distill.teacher,
            "distill.teacher",
            config.distill.trust_remote_code,
        )
    else:
        return None
    provider = _declared(name, trusts)
    return (
        None if provider is None else set_shared_settings(provider, name, config, world_size, key)
    )


def _declared(name: str, trust_remote_code: bool) -> Any:
    """Return the provider from a directory, from the size of a recipe, or from the download cache."""
    from megatron.bridge.models.conversion.pretrained import provider_of

    if Path(name).is_dir():
        return provider_of(name, trust_remote_code)
    if (size := published_size(name)) is not None:
        return size.provider()
    found = on_this_machine(name)
    return None if found is None else provider_of(str(found), trust_remote_code)
