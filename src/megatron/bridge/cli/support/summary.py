# SPDX-License-Identifier: Apache-2.0
"""A summary of a config for people, computed from shapes without building a model."""

from collections.abc import Iterator

from megatron.bridge.autotune.meta_model import parameter_count
from megatron.bridge.cli.support import rank_diagram, text_format
from megatron.bridge.data.config import MockGPTDatasetConfig
from megatron.bridge.training.config import ConfigContainer

__all__ = ["describe", "parameter_count", "warnings"]


def describe(config: "ConfigContainer", world_size: int) -> list[str]:
    from megatron.bridge.training.config.batch_size import BatchSize

    model, train = config.model, config.train
    replicas = config.data_parallel_size(world_size)
    tokens = train.global_batch_size * config.dataset.seq_length
    microbatches = train.global_batch_size // (train.micro_batch_size * replicas)
    whole = BatchSize(train).samples_after(train.train_iters) * config.dataset.seq_length
    first = f", growing from {train.rampup_batch_size[0]} samples" if train.rampup_batch_size else ""
    return [
        f"model: {parameter_count(model):,} parameters, {model.num_layers} layers, hidden size {model.hidden_size}",
        f"layout: {rank_diagram.summary(config, world_size)}",
        f"run: {train.train_iters:,} steps, {whole:,} tokens; each step {train.global_batch_size} samples x "
        f"{config.dataset.seq_length} tokens = {tokens:,} tokens, in "
        f"{text_format.many(microbatches, 'microbatch', 'es')} of {train.micro_batch_size}"
        f"{f' on each of {replicas} replicas' if replicas > 1 else ''}{first}",
    ]


def warnings(config: "ConfigContainer") -> Iterator[str]:
    if isinstance(config.dataset, MockGPTDatasetConfig):
        yield "no data was given: this run trains on mock data (use --data PATH for real data)"
    if config.checkpoint.save is None:
        yield "checkpoint.save is not set: this run saves no checkpoint (set checkpoint.save=DIR)"
