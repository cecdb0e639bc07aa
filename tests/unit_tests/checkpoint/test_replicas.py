# SPDX-License-Identifier: Apache-2.0
"""Which rank writes which replica: Megatron-Core's own distribution is the reference."""

from collections import defaultdict

import numpy as np
import pytest
from megatron.core.dist_checkpointing.exchange_utils import distribute_shards_to_ranks
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from megatron.bridge.checkpoint.hashing_writer import check_objects
from megatron.bridge.checkpoint.replicas import MainShards, assign_writers, shard_holders

RANKS, EXPERT_RANKS = 8, 2


def _held(rank):
    """The shards of a rank: dense weights of all ranks, experts of every second one, a slice of its own."""
    dense = {10 + index: size for index, size in enumerate((900, 400, 300, 300, 50, 7, 7, 7, 1))}
    experts = {100 * (1 + rank % EXPERT_RANKS) + index: 200 + index for index in range(6)}
    return dense | experts | {1000 + rank: 500 + 10 * rank}


def _ours(held):
    """The writers, with the first rank that holds a shard as its main one."""
    first = {digest: rank for rank in reversed(range(RANKS)) for digest in held[rank]}
    others = [
        np.array([d for d in held[rank] if first[d] != rank], dtype=np.int64)
        for rank in range(RANKS)
    ]
    holders = shard_holders(others)
    main = []
    for rank in range(RANKS):
        mine = {digest: size for digest, size in held[rank].items() if first[digest] == rank}
        shared = {digest: size for digest, size in mine.items() if digest in holders}
        main.append(MainShards(sum(mine.values()) - sum(shared.values()), shared))
    return assign_writers(main, holders) | {
        digest: rank for digest, rank in first.items() if digest not in holders
    }


def _loads(writers, sizes):
    loads = [0] * RANKS
    for digest, rank in writers.items():
        loads[rank] += sizes[digest]
    return loads


def test_writers_share_the_bytes_like_megatron_core():
    held = [_held(rank) for rank in range(RANKS)]
    ranks, sizes = defaultdict(list), {}
    for rank, shards in enumerate(held):
        for digest, size in shards.items():
            ranks[digest].append(rank)
            sizes[digest] = size
    theirs = distribute_shards_to_ranks(ranks, sizes, RANKS, set())
    ours = _ours(held)
    assert ours.keys() == theirs.keys()
    assert all(digest in held[rank] for digest, rank in ours.items())
    assert sorted(_loads(ours, sizes)) == sorted(_loads(theirs, sizes))


def test_a_shard_whose_main_replica_is_elsewhere_is_not_written_here():
    holders = shard_holders([np.array([5], dtype=np.int64), np.array([5], dtype=np.int64)])
    assert holders == {5: (0, 1)}
    assert assign_writers([MainShards(0, {}), MainShards(0, {})], holders) == {}


def test_nothing_is_shared():
    assert shard_holders([np.array([], dtype=np.int64)] * 3) == {}


def test_a_missing_part_of_an_object_is_an_error():
    parts = {f"state.rank/shard_{rank}_4": BytesStorageMetadata() for rank in range(4)}
    check_objects(Metadata({**parts, "weight": BytesStorageMetadata()}))
    del parts["state.rank/shard_2_4"]
    with pytest.raises(AssertionError, match=r"state\.rank': 1"):
        check_objects(Metadata(dict(parts)))
