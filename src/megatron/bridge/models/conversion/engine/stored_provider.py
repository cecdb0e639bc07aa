# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingTypeStubs=false
"""Read the provider of a Megatron checkpoint, and set its parallel sizes for the processes that load it."""

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.core import parallel_state
from torch import nn

from megatron.bridge.checkpoint import inspection, model_io, paths
from megatron.bridge.models.model_provider import EVEN_STAGES, PARALLEL_SIZES, PreWrapHook
from megatron.bridge.utils import unpickling
from megatron.bridge.utils.config.serialize import from_plain
from megatron.bridge.utils.errors import UserError, did_you_mean

MakeProvider = Callable[[bool], Any]  # creates a provider with or without weights
EMBEDDING = "embedding.word_embeddings.weight"

# layout settings of a provider for one process
ONE_PROCESS: dict[str, Any] = {
    **dict.fromkeys(PARALLEL_SIZES, 1),
    "virtual_pipeline_model_parallel_size": None,
    "hierarchical_context_parallel_sizes": None,
    "hybrid_context_parallel": False,
    "max_seqlen_per_dp_cp_rank": None,
    "expert_tensor_parallel_size": None,
    "sequence_parallel": False,
    "tp_comm_overlap": False,
    **EVEN_STAGES,
}


def read(path: str | Path) -> Any:
    """Read the provider as it was saved, including its parallel sizes."""
    return from_plain(model_io.read_run_config(path)["model"], trust=unpickling.is_trusted())


def load_hook(path: str | Path) -> PreWrapHook:
    """Return a hook that loads the checkpoint into a new model."""
    return PreWrapHook(lambda chunks: model_io.load_model(chunks, path), fills_every_parameter=True)


def read_for_layout(
    path: str | Path, mp_overrides: Mapping[str, Any] | None, default: MakeProvider | None = None
) -> Any:
    """Read the provider with the parallel sizes of ``mp_overrides``, the running groups, or one process.

    ``default`` creates the provider of a checkpoint that does not describe its model, such as Megatron-LM's.
    """
    undescribed = default is not None and not model_io.has_run_config(path)
    provider = default(False) if default is not None and undescribed else read(path)
    for name, value in {**_running_layout(), **(mp_overrides or {})}.items():
        if name not in ONE_PROCESS:
            raise UserError(
                f"mp_overrides.{name} is not a parallel size{did_you_mean(name, ONE_PROCESS)}"
            )
        setattr(provider, name, value)
    if undescribed:
        _pad_vocabulary(provider, path)
    return provider


def _pad_vocabulary(provider: Any, path: str | Path) -> None:
    """Set the vocabulary size to the embedding rows of the checkpoint, because Megatron-LM saves its padding."""
    stored = inspection.list_tensors(paths.resolve(path)).get(EMBEDDING)
    ranks = provider.tensor_model_parallel_size
    if (
        stored is not None
        and stored.shape[0] > provider.vocab_size
        and stored.shape[0] % ranks == 0
    ):
        provider.should_pad_vocab = True
        provider.make_vocab_size_divisible_by = stored.shape[0] // ranks


def _running_layout() -> dict[str, Any]:
    """Return the parallel sizes of the existing process groups, or of one process."""
    if not parallel_state.model_parallel_is_initialized():
        return ONE_PROCESS
    return ONE_PROCESS | {
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "virtual_pipeline_model_parallel_size": parallel_state.get_virtual_pipeline_model_parallel_world_size(),
        "context_parallel_size": parallel_state.get_context_parallel_world_size(),
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel_size": parallel_state.get_expert_tensor_parallel_world_size(),
    }


def provider_of(model: nn.Module | Sequence[nn.Module]) -> Any:
    """Return a copy of the declared provider from which one or all chunks were built."""
    config: Any = model_io.unwrap(model_io.as_chunks(model)[0]).config
    return copy.copy(getattr(config, "declared", config))
