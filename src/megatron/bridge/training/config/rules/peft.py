# SPDX-License-Identifier: Apache-2.0
"""Rules on adapters."""

from collections.abc import Iterator

from megatron.bridge.training.config.run_config import RunConfig


def peft_settings_are_valid(config: RunConfig, world_size: int) -> Iterator[str]:
    """The PEFT method accepts its settings."""
    if config.peft is not None:
        yield from config.peft.problems()


def peft_needs_pretrained_checkpoint(config: RunConfig, world_size: int) -> Iterator[str]:
    """Adapters need base weights."""
    if config.peft is not None and config.checkpoint.pretrained_checkpoint is None:
        yield (
            f"peft is {type(config.peft).__name__}, but checkpoint.pretrained_checkpoint is not set: give the "
            "weights to put the adapters on, a Megatron checkpoint or a Hugging Face directory"
        )
