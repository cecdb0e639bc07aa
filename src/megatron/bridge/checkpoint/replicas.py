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
    shards = [(_digest_of(entry), entry) for entry in entries]
    main = {
        shard_digest: shard for shard_digest, shard in shards if is_main_replica(shard.replica_id)
    }
    replica_digests = np.array(
        sorted({shard_digest for shard_digest, _ in shards} - main.keys()), dtype=np.int64
    )
    holders = shard_holders(distributed.all_gather_object(replica_digests, group))
    sizes = {
        shard_digest: math.prod(shard.local_shape) * shard.dtype.itemsize
        for shard_digest, shard in main.items()
    }
    shared = {shard_digest: size for shard_digest, size in sizes.items() if shard_digest in holders}
    main_shards = MainShards(sum(sizes.values()) - sum(shared.values()), shared)
    writers = assign_writers(distributed.all_gather_object(main_shards, group), holders)
    rank = distributed.group_rank(group)
    for shard_digest, shard in shards:
        is_mine = writers[shard_digest] == rank if shard_digest in writers else shard_digest in main
        shard.replica_id = 0 if is_mine else 1


def _digest_of(shard: ShardedTensor) -> int:
    return digest(repr((shard.key, tuple(shard.global_offset), shard.flattened_range)))


def shard_holders(digests_by_rank: Sequence[np.ndarray]) -> dict[int, tuple[int, ...]]:
    """Shard -> the ranks that hold a replica besides the main one; ``digests_by_rank`` are their digests, by rank."""
    digests = np.concatenate(digests_by_rank)
    ranks = np.repeat(np.arange(len(digests_by_rank)), [len(part) for part in digests_by_rank])
    order = np.argsort(digests, kind="stable")
    unique_digests, starts = np.unique(digests[order], return_index=True)
    parts = np.split(ranks[order], starts[1:])
    return {
        shard_digest: tuple(part.tolist())
        for shard_digest, part in zip(unique_digests.tolist(), parts, strict=False)
    }


def assign_writers(
    main: Sequence[MainShards], holders: Mapping[int, tuple[int, ...]]
) -> dict[int, int]:
    """Shared shard -> the rank that writes it; the next largest shard goes to the rank with the fewest bytes."""
    written = [rank.unshared for rank in main]
    together: dict[tuple[int, ...], list[tuple[int, int]]] = defaultdict(list)
    for rank, part in enumerate(main):
        for shard_digest, size in part.shared.items():
            together[rank, *holders[shard_digest]].append((-size, shard_digest))
    writers: dict[int, int] = {}
    for ranks, shards in sorted(together.items(), key=lambda entry: len(entry[0])):
        loads = [(written[rank], rank) for rank in ranks]
        heapq.heapify(loads)
        for size, shard_digest in sorted(shards):
            total, rank = loads[0]
            writers[shard_digest], written[rank] = rank, total - size
            heapq.heapreplace(loads, (written[rank], rank))
    return writers


def _data_parallel_group() -> Any:
    """The ranks that hold the same part of the model; all ranks (None) without Megatron-Core's groups."""
    if not parallel_state.model_parallel_is_initialized():
        return None
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def digest(name: str) -> int:
    """A 64-bit hash of a name, the same in all processes, unlike Python's own hashes."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), signed=True)
