# SPDX-License-Identifier: Apache-2.0
"""Rules on rows that hold several samples."""

from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.resolve_data import sequence_multiple, tuning_parts


def packed_rows_come_alone(config: ConfigContainer, world_size: int) -> str | None:
    """Attention over packed samples takes one row."""
    micro = config.train.micro_batch_size
    if micro == 1 or not any(part.packed for part in tuning_parts(config.dataset)):
        return None
    return (
        f"train.micro_batch_size={micro} with packed samples: a packed row is as much as several samples, so set "
        f"train.micro_batch_size=1 and lower train.global_batch_size, which counts rows"
    )


def samples_can_be_cut(config: ConfigContainer, world_size: int) -> str | None:
    """Context parallelism cuts each sample of a row into equal chunks."""
    for part in tuning_parts(config.dataset):
        needed = sequence_multiple(config, part.padding_free)
        if part.joins_samples and part.sequence_multiple % needed:
            return (
                f"dataset.packed_sequence_specs.pad_seq_to_mult={part.sequence_multiple} is no multiple of "
                f"{needed}, which the context and sequence parallel layout needs: leave it unset, or use {needed}"
            )
    return None
