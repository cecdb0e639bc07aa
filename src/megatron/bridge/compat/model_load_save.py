# SPDX-License-Identifier: Apache-2.0
"""Models in Megatron's format outside of a run: their config, and one process to load them in."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from torch import nn

from megatron.bridge.models.conversion.engine import side_files, stored_provider
from megatron.bridge.models.hf_pretrained import PreTrainedCausalLM
from megatron.bridge.utils import distributed
from megatron.bridge.utils.errors import UserError
from megatron.bridge.utils.patching import patched


def load_model_config(checkpoint_path: str | Path) -> tuple[Any, None]:
    """The provider that a checkpoint was saved with, and None instead of Megatron-LM's arguments."""
    return stored_provider.read(checkpoint_path), None


def save_megatron_model(
    model: nn.Module | Sequence[nn.Module],
    path: str | Path,
    hf_tokenizer_path: str | Path | None = None,
) -> Path:
    """``AutoBridge.save_megatron_model`` without a bridge."""
    source = PreTrainedCausalLM(hf_tokenizer_path) if hf_tokenizer_path else None
    return side_files.save_megatron(model, path, source)


@contextmanager
def temporary_distributed_context(backend: str = "gloo") -> Iterator[None]:
    """A process group and model-parallel groups of this process alone, which end with the context."""
    if distributed.is_initialized():
        raise UserError(
            "temporary_distributed_context creates a process group, but one exists already: remove it"
        )
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def megatron_cpu_init_context(config: Any) -> AbstractContextManager[None]:
    """Let the provider ``config`` build its models on the CPU, inside the context."""
    return patched(config, use_cpu_initialization=True)
