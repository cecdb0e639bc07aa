# SPDX-License-Identifier: Apache-2.0
"""A model chunk: a record of facts other than its parameters, and its mode."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from megatron.bridge.checkpoint.model_io import unwrap


@dataclass
class ChunkInfo:
    """A record of one chunk while its process lives; wrappers, optimizers and checkpoints do not see it."""

    peft: Any = (
        None  # the ``peft.base.PEFT`` that added the chunk's adapters; None without adapters
    )
    trained: frozenset[str] = (
        frozenset()
    )  # names of the parameters that ``peft`` trains, as the chunk calls them
    base: dict[str, str] | None = (
        None  # name and fingerprint of the weights that the adapters were added to
    )
    # the checkpoint that the chunk was filled from before it got parameters that the checkpoint lacks
    filled_from: str | None = None
    # the ``training.distillation.student_teacher.ChunkPair`` of a student; None without a teacher
    student_teacher: Any = None


def chunk_info(chunk: nn.Module) -> ChunkInfo:
    """The record of a chunk, wrapped or not."""
    bare: Any = unwrap(chunk)
    if not hasattr(bare, "chunk_info"):
        bare.chunk_info = ChunkInfo()
    return bare.chunk_info


@contextmanager
def evaluation_mode(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """Set chunks to evaluation mode inside the context, and restore their modes."""
    modes = [chunk.training for chunk in chunks]
    for chunk in chunks:
        chunk.eval()
    try:
        yield
    finally:
        for chunk, mode in zip(chunks, modes, strict=True):
            chunk.train(mode)
