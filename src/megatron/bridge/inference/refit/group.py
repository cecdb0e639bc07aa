# SPDX-License-Identifier: Apache-2.0
"""Send weights to engines of other projects by a broadcast over a group that the engine's processes have joined.

vLLM and SGLang receive names, dtypes and shapes in a separate call, and the weights while it runs. Both use buckets in
which tensors are contiguous.
"""

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as torch_dist
from torch import Tensor

from megatron.bridge.inference.refit.packing import BucketSlot, buffer_bytes
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
    """Join a group of the trainer's rank 0 and an engine's processes, in addition to their other groups.

    ``rank`` 0 is the trainer, and ``world_size`` is the number of the engine's processes plus one. All processes pass
    the same ``backend``, ``nccl`` or ``gloo``, and the ``name`` of ``init_weights_update_group``.
    """
    dist: Any = torch_dist  # torch has no public function for a group outside the default group
    meeting = dist.rendezvous(f"tcp://{address}:{port}", rank, world_size, timeout=timeout)
    store, *_ = next(meeting)
    store.set_timeout(timeout)
    c10d: Any = dist.distributed_c10d
    make = c10d._new_process_group_helper
    group, _ = make(
        world_size,
        rank,
        [],
        backend,
        dist.PrefixStore(name, store),
        group_name=name,
        timeout=timeout,
    )
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
    """Send the weights once; every rank of the trainer must call this.

    Args:
        stream: weights of the model.
        group: result of ``join_group``, or another object with ``broadcast(tensor, 0)``, such as vLLM's communicator;
            None on all ranks except 0.
        call: starts the engine's update with keyword arguments and returns a function that waits for its end. vLLM's
            update is called once with ``update_info``, SGLang's ``update_weights_from_distributed`` once per bucket
            with its arguments.
        api: engine whose update is called.
        bucket_bytes: the first tensor that exceeds this size ends a bucket; memory holds two buckets.
        changed_only: skip tensors that have not changed since the last call.
    """
    apis: dict[str, Any] = {"vllm": _to_vllm, "sglang": _to_sglang}
    if api not in apis:
        raise UserError(f"api={api!r} is not one of {', '.join(apis)}{did_you_mean(api, apis)}")
    push = None if group is None else partial(apis[api], group, call, bucket_bytes)
    return sent(stream, push, changed_only)


def dense_layout(infos: Sequence[WeightInfo], bucket_bytes: int) -> list[list[BucketSlot]]:
    """Return contents and offsets of each bucket as the engines compute them.

    Example:
        >>> infos = [WeightInfo(name, (10,), torch.float32) for name in "abc"]
        >>> [[(slot.info.name, slot.start) for slot in bucket] for bucket in dense_layout(infos, 60)]
        [[('a', 0), ('b', 40)], [('c', 0)]]
    """
    buckets: list[list[BucketSlot]] = []
    for info in infos:
        start = buckets[-1][-1].stop if buckets else 0
        if not buckets or start > bucket_bytes:
            buckets.append([])
            start = 0
        if start % info.dtype.itemsize:
            raise UserError(
                f"tensor {info.name} of {info.dtype} would begin at byte {start} of its bucket, which is not aligned "
                "for its dtype: give WeightStream(dtype=), so that all tensors have one dtype"
            )
        buckets[-1].append(BucketSlot(info, start))
    return buckets


def described(infos: Sequence[WeightInfo], dtypes: str) -> dict[str, Any]:
    """Return names, dtypes (under the key ``dtypes``) and shapes in the format of both engines."""
    return {
        "names": [info.name for info in infos],
        dtypes: [str(info.dtype).removeprefix("torch.") for info in infos],
        "shapes": [list(info.shape) for info in infos],
    }


def _to_vllm(
    group: Any, call: Any, bucket_bytes: int, infos: Sequence[WeightInfo], writes: Iterator[Write]
) -> None:
    buckets = dense_layout(infos, bucket_bytes)
    packed = {"packed": True, "packed_buffer_size_bytes": bucket_bytes, "packed_num_buffers": 2}
    wait = call({**described(infos, "dtype_names"), **packed})
    for _ in _broadcast_buckets(group, buckets, writes):
        pass
    wait()


def _to_sglang(
    group: Any, call: Any, bucket_bytes: int, infos: Sequence[WeightInfo], writes: Iterator[Write]
) -> None:
    buckets = dense_layout(infos, bucket_bytes)
    name = getattr(group, "group_name", GROUP_NAME)
    waits: list[Wait] = []
    for bucket in _broadcast_buckets(group, buckets, writes):
        for wait in waits:  # the engine handles one call at a time
            wait()
        keywords = described([slot.info for slot in bucket], "dtypes")
        waits = [call({**keywords, "group_name": name, "load_format": "flattened_bucket"})]
    for wait in waits:
        wait()


def _broadcast_buckets(
    group: Any, buckets: Sequence[Sequence[BucketSlot]], writes: Iterator[Write]
) -> Iterator[Sequence[BucketSlot]]:
    """Yield each bucket when it is full; its broadcast overlaps with filling the next bucket."""
    device = torch.cuda.current_device()
    buffers = [
        torch.empty(buffer_bytes(buckets), dtype=torch.uint8, device=device) for _ in range(2)
    ]
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
