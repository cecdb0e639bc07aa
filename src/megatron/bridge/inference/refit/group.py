# SPDX-License-Identifier: Apache-2.0
"""Send weights to engines of other projects: broadcast over a group that the engine's processes have joined.

vLLM and SGLang get names, dtypes and shapes in a separate call, and receive while it runs. Both use buckets in which
tensors are contiguous.
"""

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as torch_dist
from torch import Tensor

from megatron.bridge.inference.refit.packing import Slot, buffer_bytes
from megatron.bridge.inference.refit.sender import RefitReport, sent
from megatron.bridge.inference.refit.stream import BUCKET_BYTES, WeightInfo, WeightStream
from megatron.bridge.utils.errors import UserError, did_you_mean

Wait = Callable[[], object]
Write = Callable[[Tensor], None]
GROUP_NAME = "weight_update_group"


def join_group(
    address: str,
    port: int,
    world_size: int,
    rank: int = 0,
    backend: str = "nccl",
    name: str = GROUP_NAME,
    timeout: timedelta = timedelta(minutes=10),
) -> Any:
    """Join a group of a trainer's rank 0 and the processes of an engine, in addition to their other groups.

    ``rank`` 0 is the trainer, and ``world_size`` is the number of the engine's processes plus one. All give the same
    ``backend``, ``nccl`` or ``gloo``, and the ``name`` of ``init_weights_update_group``.
    """
    dist: Any = torch_dist  # torch has no public function for a group that is no part of the default one
    meeting = dist.rendezvous(f"tcp://{address}:{port}", rank, world_size, timeout=timeout)
    store, *_ = next(meeting)
    store.set_timeout(timeout)
    c10d: Any = dist.distributed_c10d
    make = c10d._new_process_group_helper
    group, _ = make(world_size, rank, [], backend, dist.PrefixStore(name, store), group_name=name, timeout=timeout)
    c10d._world.pg_group_ranks[group] = {member: member for member in range(world_size)}
    return group


def broadcast_weights(
    stream: WeightStream,
    group: Any,
    call: Callable[[dict[str, Any]], Wait],
    api: Literal["vllm", "sglang"],
    bucket_bytes: int = BUCKET_BYTES,
    changed_only: bool = False,
) -> RefitReport:
    """Send weights once; every rank of the trainer calls this.

    Args:
        stream: of the model.
        group: of ``join_group``, or any other with ``broadcast(tensor, 0)``, such as vLLM's communicator; None on
            all ranks but 0.
        call: starts the engine's update with these keywords and returns a function that waits for its end. For
            vLLM they are ``update_info``, once; for SGLang, those of ``update_weights_from_distributed``, once for
            each bucket.
        api: whose call it is.
        bucket_bytes: a bucket ends with the first tensor that goes beyond this; there are two of them.
        changed_only: leave out what is as it was at the last call.
    """
    apis: dict[str, Any] = {"vllm": _to_vllm, "sglang": _to_sglang}
    if api not in apis:
        raise UserError(f"api={api!r} is not one of {', '.join(apis)}{did_you_mean(api, apis)}")
    push = None if group is None else partial(apis[api], group, call, bucket_bytes)
    return sent(stream, push, changed_only)


def dense_layout(infos: Sequence[WeightInfo], bucket_bytes: int) -> list[list[Slot]]:
    """The contents and offsets of each bucket, as the engines compute them.

    Example:
        >>> infos = [WeightInfo(name, (10,), torch.float32) for name in "abc"]
        >>> [[(slot.info.name, slot.start) for slot in bucket] for bucket in dense_layout(infos, 60)]
        [[('a', 0), ('b', 40)], [('c', 0)]]
    """
    buckets: list[list[Slot]] = []
    for info in infos:
        start = buckets[-1][-1].stop if buckets else 0
        if not buckets or start > bucket_bytes:
            buckets.append([])
            start = 0
        if start % info.dtype.itemsize:
            raise UserError(
                f"tensor {info.name} of {info.dtype} would begin at byte {start} of its bucket, where no such "
                "number can be read: give WeightStream(dtype=), so that all tensors have one dtype"
            )
        buckets[-1].append(Slot(info, start))
    return buckets


def described(infos: Sequence[WeightInfo], dtypes: str) -> dict[str, Any]:
    """Names, dtypes (under the key ``dtypes``) and shapes, as both engines take them."""
    return {
        "names": [info.name for info in infos],
        dtypes: [str(info.dtype).removeprefix("torch.") for info in infos],
        "shapes": [list(info.shape) for info in infos],
    }


def _to_vllm(group: Any, call: Any, bucket_bytes: int, infos: Sequence[WeightInfo], writes: Iterator[Write]) -> None:
    buckets = dense_layout(infos, bucket_bytes)
    packed = {"packed": True, "packed_buffer_size_bytes": bucket_bytes, "packed_num_buffers": 2}
    wait = call({**described(infos, "dtype_names"), **packed})
    for _ in _broadcast(group, buckets, writes):
        pass
    wait()


def _to_sglang(group: Any, call: Any, bucket_bytes: int, infos: Sequence[WeightInfo], writes: Iterator[Write]) -> None:
    buckets = dense_layout(infos, bucket_bytes)
    name = getattr(group, "group_name", GROUP_NAME)
    waits: list[Wait] = []
    for bucket in _broadcast(group, buckets, writes):
        for wait in waits:  # the engine takes one call after the other
            wait()
        keywords = described([slot.info for slot in bucket], "dtypes")
        waits = [call({**keywords, "group_name": name, "load_format": "flattened_bucket"})]
    for wait in waits:
        wait()


def _broadcast(group: Any, buckets: Sequence[Sequence[Slot]], writes: Iterator[Write]) -> Iterator[Sequence[Slot]]:
    """Yield each bucket when it is filled; it is broadcast while the next one is filled."""
    device = torch.cuda.current_device()
    buffers = [torch.empty(buffer_bytes(buckets), dtype=torch.uint8, device=device) for _ in range(2)]
    works: list[Any] = [None, None]
    for index, bucket in enumerate(buckets):
        if works[index % 2] is not None:
            works[index % 2].wait()
        buffer = buffers[index % 2]
        for slot in bucket:
            next(writes)(slot.view(buffer))
        yield bucket
        works[index % 2] = group.broadcast(buffer[: bucket[-1].stop], 0)
    for work in works:
        if work is not None:
            work.wait()
    if buffers[0].is_cuda:
        torch.cuda.synchronize()
