# SPDX-License-Identifier: Apache-2.0
"""Count the bytes of live tensors, storage by storage, as they are allocated and freed."""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Count the bytes of live storages that this thread allocated since it entered the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {storage._cdata for storage in _storages((args, kwargs))}
        found = func(*args, **(kwargs or {}))
        for storage in {storage._cdata: storage for storage in _storages(found)}.values():
            if storage._cdata not in given:  # views and in-place results use existing storages
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._freed, storage.nbytes())
        return found

    def _freed(self, size: int) -> None:
        self.now -= size


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
