# SPDX-License-Identifier: Apache-2.0
"""The adapters that finetune recipes recommend."""

from typing import Any

from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.models.mamba_provider import MambaModelProvider
from megatron.bridge.peft.base import PEFT
from megatron.bridge.peft.dora import DoRA
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.utils.errors import UserError, did_you_mean

METHODS: dict[str, type[LoRA] | type[DoRA]] = {"lora": LoRA, "dora": DoRA}

TARGETS = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
LATENT_TARGETS = ["*.self_attention.linear_*", "linear_fc1", "linear_fc2"]
"""Of multi-latent attention, whose projections differ with the size of the model."""
RECURRENT_TARGETS = [*TARGETS, "out_proj"]
"""Of Mamba layers and delta nets, whose input projections cannot be adapted where they are cut."""


def default_peft_config(peft_scheme: str | PEFT, model: GPTModelProvider | None = None, **changes: Any) -> PEFT:
    """All linear layers of attention and MLP, rank 16, scaled by 2.

    Args:
        peft_scheme: ``lora`` or ``dora``; a method of one's own is taken as it is.
        model: What is adapted; None has usual attention in every layer.
        **changes: Fields of the method.

    Raises:
        UserError: there is no such scheme.
    """
    if isinstance(peft_scheme, PEFT):
        return peft_scheme
    if peft_scheme not in METHODS:
        hint = did_you_mean(peft_scheme, METHODS) or f": choose {' or '.join(METHODS)}"
        raise UserError(f"peft={peft_scheme} is not known{hint}; peft=None trains all weights")
    recommended: dict[str, Any] = {"target_modules": _targets(model), "dim": 16, "alpha": 32}
    return METHODS[peft_scheme](**{**recommended, **changes})


def _targets(model: GPTModelProvider | None) -> list[str]:
    if model is None:
        return [*TARGETS]
    if model.multi_latent_attention:
        return [*LATENT_TARGETS]
    recurrent = isinstance(model, MambaModelProvider) or model.experimental_attention_variant is not None
    return [*(RECURRENT_TARGETS if recurrent else TARGETS)]
