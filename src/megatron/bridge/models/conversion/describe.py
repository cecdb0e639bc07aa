# SPDX-License-Identifier: Apache-2.0
"""Write config and tokenizer of a model trained from scratch in Hugging Face format."""

from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from megatron.bridge.models.conversion.engine import stored_provider
from megatron.bridge.models.conversion.model_bridge import (
    DecoderBridge,
    architectures,
    bridge_for,
    function_fields,
)
from megatron.bridge.models.hf_pretrained.transformers_reads import quiet_transformers
from megatron.bridge.utils.errors import UserError, did_you_mean

SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def write_description(
    checkpoint: str | Path, directory: Path, architecture: str | None = None, tokenizer: Any = None
) -> None:
    """Write the tokenizer and ``config.json``; the default is an architecture that computes the same."""
    provider = stored_provider.read(checkpoint)
    config = _config_for(provider, _choose_architecture(provider, architecture))
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)
        known = {name: getattr(tokenizer, name) for name in SPECIAL_TOKENS}
        config.update({name: token_id for name, token_id in known.items() if token_id is not None})
    config.save_pretrained(directory)


def architectures_of(provider: Any) -> list[str]:
    """Return the architectures whose models compute the same as the provider's model."""
    return [name for name in architectures() if _can_describe(provider, name)]


def _choose_architecture(provider: Any, architecture: str | None) -> str:
    if architecture is not None:
        if architecture not in architectures():
            hint = did_you_mean(architecture, architectures())
            raise UserError(f"--architecture {architecture} is not supported{hint}")
        if not _can_describe(provider, architecture):
            alternatives = ", ".join(architectures_of(provider)) or "no architecture does"
            raise UserError(
                f"--architecture {architecture} does not compute what this model does; use {alternatives}"
            )
        return architecture
    candidates = architectures_of(provider)
    if len(candidates) == 1:
        return candidates[0]
    if not candidates:
        raise UserError(
            "no Hugging Face architecture computes what this model does: give --hf-model"
        )
    raise UserError(
        f"{', '.join(candidates)} compute what this model does: choose one with --architecture {candidates[0]}"
    )


def _can_describe(provider: Any, architecture: str) -> bool:
    """Return whether a config of the architecture can describe the provider's model exactly."""
    from huggingface_hub.errors import StrictDataclassError

    bridge = bridge_for(SimpleNamespace(architectures=[architecture]))
    if (
        architecture not in _model_types()
        or not isinstance(bridge, DecoderBridge)
        or not bridge.can_say(provider)
    ):
        return False

    try:
        config = _config_for(provider, architecture)
        again = bridge.provider_bridge(SimpleNamespace(config=config))
    except (
        UserError,
        StrictDataclassError,
        TypeError,
        ValueError,
    ):  # values that the architecture cannot have
        return False
    return all(
        getattr(again, name, None) == getattr(provider, name, None) for name in function_fields()
    )


def _config_for(provider: Any, architecture: str) -> Any:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING

    values = bridge_for(SimpleNamespace(architectures=[architecture])).megatron_to_hf_config(
        provider
    )
    kind: Any = CONFIG_MAPPING[_model_types()[architecture]]
    dtype = (
        torch.bfloat16
        if provider.bf16
        else torch.float16
        if provider.fp16
        else provider.params_dtype
    )
    with quiet_transformers():  # the default tokens of a class may exceed this vocabulary
        config = kind(**{**values, "dtype": dtype})
    for name in SPECIAL_TOKENS:  # the class defaults are those of published models
        with suppress(StrictDataclassError):
            setattr(config, name, None)
    return config


def _model_types() -> dict[str, str]:
    """Return the ``model_type`` of each architecture's config in transformers."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return {name: kind for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()}
