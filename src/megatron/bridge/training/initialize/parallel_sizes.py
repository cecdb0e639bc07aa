# SPDX-License-Identifier: Apache-2.0
"""The parallel sizes of a run."""

from dataclasses import dataclass
from typing import Any

from megatron.core import parallel_state

from megatron.bridge.utils import distributed


@dataclass(frozen=True)
class ParallelSizes:
    """The parallel sizes of a run. State that belongs to one rank fits the same sizes only."""

    world: int
    tensor: int
    pipeline: int
    virtual: int
    context: int
    expert: int
    expert_tensor: int

    @classmethod
    def current(cls) -> "ParallelSizes":
        return cls(
            distributed.world_size(),
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_pipeline_model_parallel_world_size(),
            parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
            parallel_state.get_context_parallel_world_size(),
            parallel_state.get_expert_model_parallel_world_size(),
            parallel_state.get_expert_tensor_parallel_world_size() or 1,
        )

    @classmethod
    def of(cls, model: Any) -> "ParallelSizes":
        return cls(
            distributed.world_size(),
            model.tensor_model_parallel_size,
            model.pipeline_model_parallel_size,
            model.virtual_pipeline_model_parallel_size or 1,
            model.context_parallel_size,
            model.expert_model_parallel_size,
            model.expert_tensor_ranks,
        )
