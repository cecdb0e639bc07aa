# SPDX-License-Identifier: Apache-2.0
"""Rules on adapters."""

from megatron.bridge.training.config.run_config import RunConfig


def peft_settings_are_valid(config: RunConfig, world_size: int) -> str | None:
    """The PEFT method accepts its settings."""
    return None if config.peft is None else "; ".join(config.peft.problems()) or None


def peft_needs_pretrained_checkpoint(config: RunConfig, world_size: int) -> str | None:
    """Adapters need base weights."""
    if config.peft is None or config.checkpoint.pretrained_checkpoint is not None:
        return None
    return (
        f"peft is {type(config.peft).__name__}, but checkpoint.pretrained_checkpoint is not set: give the weights "
        "to put the adapters on, a Megatron checkpoint or a Hugging Face directory"
    )
