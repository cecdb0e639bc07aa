# SPDX-License-Identifier: Apache-2.0
"""State of a rank: the parallel sizes that it belongs to, and its random number generators."""

import random
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.tensor_parallel.random import convert_cuda_rng_state, initialize_rng_tracker

from megatron.bridge.backends.specs import layer_specs
from megatron.bridge.training.config import RNGConfig
from megatron.bridge.utils import distributed


def current_sizes() -> dict[str, int]:
    """The sizes of the process groups that exist."""
    return {
        "world": distributed.world_size(),
        "tensor": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline": parallel_state.get_pipeline_model_parallel_world_size(),
        "virtual": parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
        "context": parallel_state.get_context_parallel_world_size(),
        "expert": parallel_state.get_expert_model_parallel_world_size(),
        "expert_tensor": parallel_state.get_expert_tensor_parallel_world_size() or 1,
    }


def sizes_of(model: Any) -> dict[str, int]:
    return {
        "world": distributed.world_size(),
        "tensor": model.tensor_model_parallel_size,
        "pipeline": model.pipeline_model_parallel_size,
        "virtual": model.virtual_pipeline_model_parallel_size or 1,
        "context": model.context_parallel_size,
        "expert": model.expert_model_parallel_size,
        "expert_tensor": model.expert_tensor_ranks,
    }


def prepare_tracker(model: Any) -> None:
    """Let Megatron-Core keep its random states as generators if ``model`` is captured in CUDA graphs.

    A graph holds the generators that were there at its capture, and advances them at each replay.
    """
    graphs = model.cuda_graph_impl != "none"
    engine = graphs and layer_specs.resolve_backend(model.backend) == "transformer_engine"
    initialize_rng_tracker(
        use_te_rng_tracker=engine, use_cudagraphable_rng=graphs, force_reset=True
    )


def seed_everything(rng: RNGConfig, step: int = 0) -> None:
    """Seed Python, NumPy, torch and the model-parallel generators.

    Pipeline stages get different seeds, because they hold different layers; data-parallel ranks only with
    ``data_parallel_random_init``. Resumed at ``step``, dropout does not repeat the masks of the first steps.
    """
    seed = rng.seed + step + 100 * parallel_state.get_pipeline_model_parallel_rank()
    if rng.data_parallel_random_init:
        seed += 10 * parallel_state.get_data_parallel_rank()
    import rich.style  # noqa: F401 - it draws from `random` when it is imported, which must not be after the seed

    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def random_states() -> dict[str, Any]:
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "tracker": {
            name: convert_cuda_rng_state(state) for name, state in _tracker().get_states().items()
        },
    }


def set_random_states(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.cuda.set_rng_state(states["device"])
    torch.set_rng_state(states["torch"])
    generators = _tracker().get_states()
    _tracker().set_states(
        {name: _restored(generators.get(name), state) for name, state in states["tracker"].items()}
    )


def _restored(current: Any, state: torch.Tensor) -> Any:
    """``state`` as the tracker keeps it: in the generator that a captured graph holds, or as a tensor."""
    return current.set_state(state) if isinstance(current, torch.Generator) else state


def _tracker() -> Any:
    """Megatron-Core's tracker of the generators that tensor-parallel ranks share or do not share."""
    return tensor_parallel.get_cuda_rng_tracker()
