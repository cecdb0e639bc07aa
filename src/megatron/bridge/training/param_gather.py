# SPDX-License-Identifier: Apache-2.0
"""Whole weights under an overlapped parameter gather.

With ``ddp.overlap_param_gather`` an optimizer step leaves each rank with fresh values of its own shard only; the
next forward pass gathers the rest, module by module. Whatever reads weights outside of a training forward pass
(saving, exporting, evaluating) must gather first, or it sees values that are a step old (off by 1e-3).
"""

from collections.abc import Iterator
from contextlib import contextmanager

from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.module import MegatronModule


@contextmanager
def gathered_params(chunks: list[MegatronModule]) -> Iterator[None]:
    """Weights are whole inside; to be entered on all ranks. Nothing happens without the overlap, or nested."""
    overlapped = _overlapped(chunks)
    gather_params(chunks)
    yield
    for chunk in overlapped:
        chunk.enable_forward_pre_hook()


def gather_params(chunks: list[MegatronModule]) -> None:
    """Make the weights whole for good, after the last step."""
    for chunk in _overlapped(chunks):
        chunk.disable_forward_pre_hook(param_sync=True)


def _overlapped(chunks: list[MegatronModule]) -> list[DistributedDataParallel]:
    return [
        chunk
        for chunk in chunks
        if isinstance(chunk, DistributedDataParallel) and chunk.remove_forward_pre_hook_handles
    ]
