# SPDX-License-Identifier: Apache-2.0
"""How a run is spread over ranks."""

from dataclasses import dataclass
from typing import Any

from megatron.core import parallel_state

from megatron.bridge.utils import dist


@dataclass(frozen=True)
class Layout:
    """Sizes of a layout; what belongs to one rank only fits the same one."""

    world: int
    tensor: int
    pipeline: int
    virtual: int
    context: int
    expert: int
    expert_tensor: int

    @classmethod
    def current(cls) -> "Layout":
        """The layout of this process."""
        return cls(
            dist.world_size(),
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_pipeline_model_parallel_world_size(),
            parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
            parallel_state.get_context_parallel_world_size(),
            parallel_state.get_expert_model_parallel_world_size(),
            parallel_state.get_expert_tensor_parallel_world_size() or 1,
        )

    @classmethod
    def of(cls, model: Any) -> "Layout":
        """The layout that a provider asks for."""
        return cls(
            dist.world_size(),
            model.tensor_model_parallel_size,
            model.pipeline_model_parallel_size,
            model.virtual_pipeline_model_parallel_size or 1,
            model.context_parallel_size,
            model.expert_model_parallel_size,
            model.expert_tensor_parallel_size or model.tensor_model_parallel_size,
        )
