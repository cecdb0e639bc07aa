# SPDX-License-Identifier: Apache-2.0
"""Whose folder it is."""

from pathlib import Path

from megatron.bridge.checkpoint import lock
from megatron.bridge.checkpoint.collective import on_first_rank
from megatron.bridge.training.callbacks.base import Callback
from megatron.bridge.training.config import CheckpointConfig
from megatron.bridge.training.state import Run
from megatron.bridge.utils import dist
from megatron.bridge.utils.errors import UserError


class RunFolder(Callback):
    """Keeps other runs away from ``checkpoint.save``, from the first hook to the last.

    The others write there from their first hooks on, so this one comes before them, and lets go behind them.
    """

    def __init__(self, config: CheckpointConfig) -> None:
        self._root = None if config.save is None else Path(config.save)

    def on_train_start(self, context: Run) -> None:
        """Find out now, not after hours, whether the folder can be written, and that it is nobody else's."""
        root = self._root
        if root is not None:
            on_first_rank(lambda: _take(root))

    def close(self, context: Run) -> None:
        """Let the folder go."""
        if self._root is not None and dist.rank() == 0:
            lock.release(self._root)


def _take(root: Path) -> None:
    probe = root / ".writable"
    try:
        root.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(
            f"checkpoint.save={root} cannot be written: {error.strerror}; choose a folder that can"
        ) from error
    lock.acquire(root)
