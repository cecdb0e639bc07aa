# SPDX-License-Identifier: Apache-2.0
"""Rules on rows that hold several samples."""

from megatron.bridge.data.energon import EnergonProvider
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


def readers_divide_batches(config: ConfigContainer, world_size: int) -> str | None:
    """A step draws as much from each reader as from any other, under every layout."""
    if not isinstance(config.dataset, EnergonProvider) or config.dataset.readers is None:
        return None
    readers, batch = config.dataset.readers, config.train.global_batch_size
    ranks = config.data_parallel_size(world_size)
    if readers > 0 and readers % ranks == 0 and batch % readers == 0:
        return None
    return (
        f"dataset.readers={readers} must be a multiple of the data parallel size {ranks} and divide "
        f"train.global_batch_size={batch}: leave it unset, or change one of the three"
    )
