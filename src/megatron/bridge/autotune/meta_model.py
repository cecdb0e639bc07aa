# SPDX-License-Identifier: Apache-2.0
"""Build the model chunks of any rank in any layout on the meta device, in this process and without memory.

While it builds a model, Megatron-Core only asks its process groups for size and rank. During the build,
``parallel_state`` therefore holds plain objects with both, and torch a group that sends nothing.
A chunk of Llama 3.1 405B takes 15 ms, all of DeepSeek-V3 on one rank 0.5 s.
"""

import copy
import re
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.common.language_module import language_module
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.module import MegatronModule

from megatron.bridge.models.model_provider import EVEN_STAGES, ModelProvider, silenced
from megatron.bridge.utils import distributed
from megatron.bridge.utils.patching import patched

_GLOBAL = re.compile(r"^_[A-Z][A-Z_]+$")  # names of parallel_state's global variables


class _Group:
    """The part of a process group that building a model needs."""

    def __init__(self, size: int, rank: int = 0) -> None:
        self._size = size
        self._rank = rank

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


_ALONE: dict[str, Any] = {
    **EVEN_STAGES,
    "tensor_model_parallel_size": 1,
    "sequence_parallel": False,
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "overlap_p2p_comm": False,
    "overlap_moe_expert_parallel_comm": False,
    "delay_wgrad_compute": False,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": None,
    "should_pad_vocab": False,
    "make_query_groups_divisible_by": 1,
    "moe_token_dispatcher_type": "alltoall",  # the flex dispatcher needs several ranks
}
"""Settings of a model on one rank."""


def stage_chunks(model: ModelProvider, peft: Any = None) -> list[list[MegatronModule]]:
    """Build the chunks of each pipeline stage on the meta device, without wrappers, for a provider with a valid layout.

    All ranks of a stage hold the same number of parameters; these are the chunks of the first. ``peft`` adds adapters.
    """
    stages = [_build_chunks(model, stage) for stage in range(model.pipeline_model_parallel_size)]
    if peft is not None:
        with as_stage(model, stage=0, several=False), torch.device("meta"):
            peft([chunk for chunks in stages for chunk in chunks])
    return stages


def whole_model(model: ModelProvider) -> MegatronModule:
    """Build the full model as one rank on the meta device, without padding of vocabulary and heads."""
    (chunk,) = _build_chunks(unsplit(model), stage=0)
    return chunk


def as_only_rank(model: ModelProvider) -> AbstractContextManager[None]:
    """Make Megatron-Core treat this process as the only rank of ``model``."""
    return as_stage(unsplit(model), stage=0)


def unsplit(model: ModelProvider) -> ModelProvider:
    """Return a copy of a provider that runs on one rank."""
    alone = copy.copy(model.declared)
    for name, value in _ALONE.items():
        if hasattr(alone, name):
            setattr(alone, name, value)
    pattern = getattr(alone, "hybrid_override_pattern", None)
    if pattern:
        alone.__dict__["hybrid_override_pattern"] = pattern.replace("|", "")  # stage boundaries
    return alone


def parameter_count(model: ModelProvider) -> int:
    """Return the parameters of the full model, with tied embeddings counted once and without padding."""
    return sum(parameter.numel() for parameter in whole_model(model).parameters())


def _build_chunks(model: ModelProvider, stage: int) -> list[MegatronModule]:
    with as_stage(model, stage), silenced(language_module), nothing_random(), torch.device("meta"):
        config = copy.copy(model.resolved())
        config.perform_initialization = False  # meta tensors have no values
        return config.build_chunks()


@contextmanager
def as_stage(model: ModelProvider, stage: int, several: bool = True) -> Iterator[None]:
    """Make Megatron-Core treat this process as the first rank of pipeline stage ``stage``.

    ``several`` tells whether the pipeline has other stages.
    """
    values = {name: _neutral_group(name) for name in vars(parallel_state) if _GLOBAL.match(name)}
    for name, value in _parallel_state_of(model, stage, several).items():
        assert name in values, f"parallel_state has no {name} in this version of Megatron-Core"
        values[name] = value
    with _default_group(), _readable_groups(), patched(parallel_state, **values):
        yield


def _neutral_group(name: str) -> Any:
    """Return a group of one rank, or none for embeddings, so that tied weights are not communicated."""
    if name.endswith("_GROUPS"):
        return {} if name == "_HYBRID_DP_CP_GROUPS" else None
    is_group = name.endswith("_GROUP") or "_GROUP_WITH" in name
    return _Group(1) if is_group and "EMBEDDING" not in name else None


def _parallel_state_of(model: ModelProvider, stage: int, several: bool) -> dict[str, Any]:
    tensor = model.tensor_model_parallel_size
    pipeline = model.pipeline_model_parallel_size if several else 1
    expert = model.expert_model_parallel_size
    expert_tensor = model.expert_tensor_ranks
    groups = {
        "_TENSOR_MODEL_PARALLEL_GROUP": (tensor, 0),
        "_PIPELINE_MODEL_PARALLEL_GROUP": (pipeline, stage),
        "_CONTEXT_PARALLEL_GROUP": (model.context_parallel_size, 0),
        "_TENSOR_AND_CONTEXT_PARALLEL_GROUP": (tensor * model.context_parallel_size, 0),
        "_MODEL_PARALLEL_GROUP": (tensor * pipeline, stage * tensor),
        "_EXPERT_MODEL_PARALLEL_GROUP": (expert, 0),
        "_EXPERT_TENSOR_PARALLEL_GROUP": (expert_tensor, 0),
        "_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": (expert * expert_tensor, 0),
    }
    numbers = {
        "_MPU_TENSOR_MODEL_PARALLEL_RANK": 0,
        "_MPU_PIPELINE_MODEL_PARALLEL_RANK": stage,
        "_MPU_DATA_PARALLEL_RANK": 0,
        "_MPU_EXPERT_MODEL_PARALLEL_RANK": 0,
        "_MPU_EXPERT_TENSOR_PARALLEL_RANK": 0,
        "_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE": model.virtual_pipeline_model_parallel_size,
    }
    return {name: _Group(*sizes) for name, sizes in groups.items()} | numbers


@contextmanager
def nothing_random() -> Iterator[None]:
    """Skip the random states that a state-space mixer needs to initialize its parameters, which it always does."""
    tracker: Any = get_cuda_rng_tracker()
    tracker.fork = lambda *_: nullcontext()
    try:
        yield
    finally:
        del tracker.fork


def _readable_groups() -> AbstractContextManager[None]:
    """Let ``torch.distributed`` also read size and rank of a ``_Group``: the hybrid model asks there."""
    get_rank = dist.get_rank
    get_size = dist.get_world_size

    def size(group: Any = None) -> int:
        return group.size() if isinstance(group, _Group) else get_size(group)

    def rank(group: Any = None) -> int:
        return group.rank() if isinstance(group, _Group) else get_rank(group)

    return patched(dist, get_rank=rank, get_world_size=size)


@contextmanager
def _default_group() -> Iterator[None]:
    """Provide a default group that sends nothing if there is none; without a group, Megatron-Core takes sizes as 1."""
    if dist.is_initialized():
        yield
        return
    hook = sys.excepthook  # each call of torch wraps this hook once more
    with distributed.fake_group(rank=0, world_size=2):
        sys.excepthook = hook
        yield
