# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's view of a corpus in shards: one index, and tokens that are read where they are."""

from typing import Any

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDataset, _BinReader, _IndexReader

from megatron.bridge.data.pretraining.shards import finished_manifest, shard_prefix


class ShardedCorpus(IndexedDataset):
    """An ``IndexedDataset`` whose ``.bin`` is spread over shards."""

    def initialize(self, path_prefix: str, multimodal: bool, mmap: bool, *others: Any) -> None:
        """Open the index and the shards; un-pickling calls this, too."""
        self.path_prefix, self.multimodal, self.mmap = path_prefix, multimodal, mmap
        self.object_storage_config, self.fast_cache_load, self.sequences_per_dataset, self.dtype_code = others
        manifest = finished_manifest(path_prefix)
        assert manifest is not None
        tokens = [shard["report"]["tokens"] for shard in manifest["shards"]]
        self.bin_reader = ShardReader(path_prefix, np.cumsum(tokens, dtype=np.int64) * manifest["token_bytes"], mmap)
        self.index = _IndexReader(f"{path_prefix}.idx", multimodal)


class ShardReader(_BinReader):
    """Reads tokens by their place in the corpus. A document lies in one shard."""

    def __init__(self, prefix: str, ends: np.ndarray, mmap: bool) -> None:
        self._prefix, self._ends, self._mmap = prefix, ends, mmap
        self._maps: dict[int, np.ndarray] = {}

    def read(self, dtype: type[np.number], count: int, offset: int) -> np.ndarray:
        shard = int(np.searchsorted(self._ends, offset, side="right"))
        offset -= int(self._ends[shard - 1]) if shard else 0
        path = f"{shard_prefix(self._prefix, shard)}.bin"
        if not self._mmap:
            return np.fromfile(path, dtype, count, offset=offset)
        if shard not in self._maps:
            self._maps[shard] = np.memmap(path, np.uint8, "r")
        return np.frombuffer(self._maps[shard], dtype, count, offset)
