# SPDX-License-Identifier: Apache-2.0
"""What a config amounts to, in lines for a person; nothing is built but shapes."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron.bridge.autotune.ranks import parameter_count
from megatron.bridge.cli import picture, words
from megatron.bridge.data.config import MockGPTDatasetConfig

if TYPE_CHECKING:
    from megatron.bridge.training.config import ConfigContainer

__all__ = ["describe", "parameter_count", "warnings"]


def describe(config: "ConfigContainer", world_size: int) -> list[str]:
    """The model, the layout, the data and the work of a step."""
    from megatron.bridge.training.batch_size import BatchSize

    model, train = config.model, config.train
    replicas = config.data_parallel_size(world_size)
    tokens = train.global_batch_size * config.dataset.seq_length
    microbatches = train.global_batch_size // (train.micro_batch_size * replicas)
    whole = BatchSize(train).samples_after(train.train_iters) * config.dataset.seq_length
    first = f", growing from {train.rampup_batch_size[0]} samples" if train.rampup_batch_size else ""
    return [
        f"model: {parameter_count(model):,} parameters, {model.num_layers} layers, "
        f"hidden size {model.hidden_size}",
        f"layout: {picture.words(config, world_size)}",
        f"step: {train.global_batch_size} samples x {config.dataset.seq_length} tokens = {tokens:,} tokens, in "
        f"{words.many(microbatches, 'microbatch', 'es')} of {train.micro_batch_size}"
        f"{f' on each of {replicas} replicas' if replicas > 1 else ''}{first}",
        f"run: {train.train_iters:,} steps, {whole:,} tokens",
        f"data: {_data(config)}",
    ]


def warnings(config: "ConfigContainer") -> Iterator[str]:
    """What a person may not expect, before a run of hours."""
    if isinstance(config.dataset, MockGPTDatasetConfig):
        yield "no data was given: this run trains on made-up samples (--data PATH for real ones)"
    if config.checkpoint.save is None:
        yield "checkpoint.save is not set: this run keeps no checkpoint (checkpoint.save=DIR)"


def _data(config: "ConfigContainer") -> str:
    kind = type(config.dataset).__name__
    return f"made-up samples ({kind})" if isinstance(config.dataset, MockGPTDatasetConfig) else kind
