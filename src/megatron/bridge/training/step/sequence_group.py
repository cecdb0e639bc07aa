# SPDX-License-Identifier: Apache-2.0
"""Which ranks share the sequences of a microbatch, and how many microbatches a step has where a plan says it."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any

from megatron.core import parallel_state
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import get_model_config

from megatron.bridge.training.state import BatchIterator
from megatron.bridge.utils.patching import patched


def group_of_sequences(batch: dict[str, Any]) -> Any:
    """The process group that splits the sequences of a microbatch, which may be this rank alone."""
    size = batch.get("cp_size", 1)
    if size == 1:
        return parallel_state.get_context_parallel_group()
    return parallel_state.get_hybrid_data_context_parallel_groups(group_size=size)


def own_schedule(model: Sequence[MegatronModule]) -> AbstractContextManager[None]:
    """Inside the context, Megatron-Core runs its usual schedules on planned microbatches.

    Its schedule for hybrid context parallelism takes one sample at a time and has no pipeline stages.
    """
    return patched(get_model_config(model[0]), hybrid_context_parallel=False)


def microbatches_of_step(batches: BatchIterator, expected: int) -> tuple[BatchIterator, int]:
    """The same microbatches, and how many of them the next step has.

    Args:
        batches: Microbatches of this rank, at the start of a step.
        expected: How many that are, unless the batches are planned by their lengths.
    """
    first = next(batches)
    return chain([first], batches), first.get("microbatches", expected)
