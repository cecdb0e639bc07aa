# SPDX-License-Identifier: Apache-2.0
"""Tell the other ranks why one of them failed, through the store in which torchrun lets the ranks find each other.

A rank that fails ends, and the ranks that wait for it lose the connection. Their own logs, which may lie on other
machines, then name the cause instead of the lost connection.
"""

import sys
from typing import Any

_KEY = "megatron_bridge/failure"


def announce(rank: int, message: str) -> None:
    """Publish the error of this rank, unless another rank was first or there are no other ranks."""
    store = _default_store()
    if store is not None:
        try:
            # sets the key only if it does not exist yet
            store.compare_set(_KEY, "", f"rank {rank}: {message}")
        except RuntimeError:
            return  # the process that holds the store has ended


def read_announcement() -> str | None:
    """Return the first error that a rank published, or None if there is none that this rank can read."""
    store = _default_store()
    if store is None:
        return None
    try:
        return store.get(_KEY).decode() if store.check([_KEY]) else None
    except RuntimeError:
        return None  # the process that holds the store has ended


def _default_store() -> Any:
    distributed = sys.modules.get("torch.distributed")  # not imported: there is no group
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.distributed_c10d._get_default_store()  # PyTorch has no public way
