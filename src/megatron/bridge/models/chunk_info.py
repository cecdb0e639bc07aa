# SPDX-License-Identifier: Apache-2.0
"""What is known of a model chunk beside its parameters, in one place."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from megatron.bridge.checkpoint.model_io import unwrap


@dataclass
class ChunkInfo:
    """A record of one chunk while its process lives; wrappers, optimizers and checkpoints do not see it."""

    peft: Any = None
    """The ``peft.base.PEFT`` that added the chunk's adapters; None without adapters."""
    trained: frozenset[str] = frozenset()
    """Names of the parameters that ``peft`` trains, as the chunk calls them."""
    base: dict[str, str] | None = None
    """Name and fingerprint of the weights that the adapters were added to."""
    filled_from: str | None = None
    """The checkpoint that the chunk was filled from before it got parameters that the checkpoint lacks."""
    student_teacher: Any = None
    """The ``training.distillation.student_teacher.ChunkPair`` of a student; None without a teacher."""


def chunk_info(chunk: nn.Module) -> ChunkInfo:
    """The record of a chunk, wrapped or not."""
    bare: Any = unwrap(chunk)
    if not hasattr(bare, "chunk_info"):
        bare.chunk_info = ChunkInfo()
    return bare.chunk_info
