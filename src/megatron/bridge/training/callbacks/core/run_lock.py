# SPDX-License-Identifier: Apache-2.0
"""The lock on the folder of a run."""

from pathlib import Path

from megatron.bridge.checkpoint import lock
from megatron.bridge.checkpoint.collective import on_first_rank
from megatron.bridge.training.callbacks.base import Callback
from megatron.bridge.training.config import CheckpointConfig
from megatron.bridge.training.state import Run
from megatron.bridge.utils import distributed
from megatron.bridge.utils.atomic import refuse_unwritable


class RunLock(Callback):
    """Locks ``checkpoint.save`` against other runs while this run writes there.

    The callback comes before all callbacks that write to the folder, so it is closed after them.
    """

    def __init__(self, config: CheckpointConfig) -> None:
        self._root = None if config.save is None else Path(config.save)

    def on_train_start(self, context: Run) -> None:
        """Refuse a folder that cannot be written or belongs to another run now, not after hours."""
        root = self._root
        if root is not None:
            on_first_rank(lambda: _lock_folder(root))

    def close(self, context: Run) -> None:
        if self._root is not None and distributed.rank() == 0:
            lock.release(self._root)


def _lock_folder(root: Path) -> None:
    probe = root / ".writable"
    with refuse_unwritable(f"checkpoint.save={root}"):
        root.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    lock.acquire(root)
