# SPDX-License-Identifier: Apache-2.0
"""Complete weights under an overlapped parameter gather.

With ``ddp.overlap_param_gather`` an optimizer step updates only the shard of each rank; the next forward pass
gathers the other values, module by module. Code that reads weights outside of a training forward pass (saving,
export, evaluation) must gather first, or it reads values of the previous step (off by 1e-3).
"""

from collections.abc import Iterator
from contextlib import contextmanager

from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.module import MegatronModule


@contextmanager
def gathered_params(chunks: list[MegatronModule]) -> Iterator[None]:
    """Gather the weights inside the context, on all ranks. It does nothing without the overlap or when nested."""
    overlapped = _overlapped(chunks)
    gather_params(chunks)
    yield
    for chunk in overlapped:
        chunk.enable_forward_pre_hook()


def gather_params(chunks: list[MegatronModule]) -> None:
    """Gather the weights and stop overlapping, after the last step."""
    for chunk in _overlapped(chunks):
        chunk.disable_forward_pre_hook(param_sync=True)


def _overlapped(chunks: list[MegatronModule]) -> list[DistributedDataParallel]:
    return [
        chunk
        for chunk in chunks
        if isinstance(chunk, DistributedDataParallel) and chunk.remove_forward_pre_hook_handles
    ]
