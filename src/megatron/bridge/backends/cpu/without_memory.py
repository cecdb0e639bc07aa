# SPDX-License-Identifier: Apache-2.0
"""Run one rank of a large job in this process: other ranks do not exist, and tensors take no memory."""

import pickle
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist

from megatron.bridge.backends.cpu import device
from megatron.bridge.utils.errors import UserError
from megatron.bridge.utils.patching import patched


@dataclass
class Traffic:
    """Python objects that ranks exchanged."""

    received: int = 0  # bytes that this rank received


@contextmanager
def one_rank(rank: int, world_size: int) -> Iterator[Traffic]:
    """Be rank ``rank`` of ``world_size``, with torch's backend ``fake``, which sends nothing.

    Tensors of the device are on the meta device. In exchanges of Python objects, every rank returns this rank's
    object, so the exchanges take realistic processor time and memory.
    """
    if device.has_cuda():
        raise UserError(
            "a rehearsal of one rank runs without a GPU, but this process sees one: set CUDA_VISIBLE_DEVICES= "
            "(empty) in its environment"
        )
    # registers the backend "fake", which ships with torch
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  # pyright: ignore

    traffic = Traffic()
    dist.init_process_group("fake", store=cast(Any, dist.HashStore()), rank=rank, world_size=world_size)
    try:
        with _everyone_says_the_same(traffic), _on_meta():
            yield traffic
    finally:
        dist.destroy_process_group()


@contextmanager
def _on_meta() -> Iterator[None]:
    meta, named = torch.device("meta"), torch.Tensor.type

    def type_of(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        """Megatron-Core's optimizer accepts only tensors of the GPU."""
        answer = named(tensor, *args, **options)
        return answer.replace("torch.meta.", "torch.cuda.") if isinstance(answer, str) else answer

    with patched(torch.Tensor, type=type_of), device.placed_on(meta), meta:
        yield


def _everyone_says_the_same(traffic: Traffic) -> AbstractContextManager[None]:
    def all_gather_object(found: list[Any], value: Any, group: Any = None) -> None:
        data = pickle.dumps(value)
        traffic.received += len(data) * len(found)
        found[:] = [pickle.loads(data) for _ in found]

    def broadcast_object_list(objects: list[Any], *args: Any, **options: Any) -> None:
        """Keep this rank's objects for every sender."""

    return patched(dist, all_gather_object=all_gather_object, broadcast_object_list=broadcast_object_list)
