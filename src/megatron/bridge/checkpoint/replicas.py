# SPDX-License-Identifier: Apache-2.0
"""Which rank writes a tensor that several ranks hold: each writes an equal share of the bytes.

Megatron-Core sends the description of every shard to every rank, in a time that grows with the square of the number of
ranks. Here only data-parallel ranks exchange messages, and only about shards that several of them hold.
"""

import heapq
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica

from megatron.bridge.utils import distributed


@dataclass(frozen=True)
class MainShards:
    """The main replicas of one rank: the bytes that no other rank holds, and digest -> bytes of shared shards."""

    unshared: int
    shared: dict[int, int]


def distribute_replicas(state: dict[str, Any]) -> None:
    """Choose one rank as the writer of each shard: its ``replica_id`` becomes 0, all others become 1.

    Every rank calls this. Tensors that only tensor-parallel ranks share are written by the first of them.

    Args:
        state: The sharded part of a state dict; the replica ids are changed in place.
    """
    group = _data_parallel_group()
    entries = [entry for entry in nested_values(state) if isinstance(entry, ShardedTensor)]
    shards = [
        (digest(repr((it.key, tuple(it.global_offset), it.flattened_range))), it) for it in entries
    ]
    main = {number: shard for number, shard in shards if is_main_replica(shard.replica_id)}
    others = np.array(sorted({number for number, _ in shards} - main.keys()), dtype=np.int64)
    holders = shard_holders(distributed.all_gather_object(others, group))
    sizes = {
        number: math.prod(shard.local_shape) * shard.dtype.itemsize
        for number, shard in main.items()
    }
    shared = {number: size for number, size in sizes.items() if number in holders}
    mine = MainShards(sum(sizes.values()) - sum(shared.values()), shared)
    writers = assign_writers(distributed.all_gather_object(mine, group), holders)
    rank = distributed.group_rank(group)
    for number, shard in shards:
        is_mine = writers[number] == rank if number in writers else number in main
        shard.replica_id = 0 if is_mine else 1


def shard_holders(others: Sequence[np.ndarray]) -> dict[int, tuple[int, ...]]:
    """Shard -> the ranks that hold a replica besides the main one; ``others`` are their digests, by rank."""
    digests = np.concatenate(others)
    ranks = np.repeat(np.arange(len(others)), [len(part) for part in others])
    order = np.argsort(digests, kind="stable")
    found, starts = np.unique(digests[order], return_index=True)
    parts = np.split(ranks[order], starts[1:])
    return {
        number: tuple(part.tolist()) for number, part in zip(found.tolist(), parts, strict=False)
    }


def assign_writers(
    main: Sequence[MainShards], holders: Mapping[int, tuple[int, ...]]
) -> dict[int, int]:
    """Shared shard -> the rank that writes it; the next largest shard goes to the rank with the fewest bytes."""
    written = [rank.unshared for rank in main]
    together: dict[tuple[int, ...], list[tuple[int, int]]] = defaultdict(list)
    for rank, part in enumerate(main):
        for number, size in part.shared.items():
            together[rank, *holders[number]].append((-size, number))
    writers: dict[int, int] = {}
    for ranks, shards in sorted(together.items(), key=lambda entry: len(entry[0])):
        least = [(written[rank], rank) for rank in ranks]
        heapq.heapify(least)
        for size, number in sorted(shards):
            total, rank = least[0]
            writers[number], written[rank] = rank, total - size
            heapq.heapreplace(least, (written[rank], rank))
    return writers


def _data_parallel_group() -> Any:
    """The ranks that hold the same part of the model; all ranks (None) without Megatron-Core's groups."""
    if not parallel_state.model_parallel_is_initialized():
        return None
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def digest(name: str) -> int:
    """A 64-bit hash of a name, the same in all processes, unlike Python's own hashes."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), signed=True)
