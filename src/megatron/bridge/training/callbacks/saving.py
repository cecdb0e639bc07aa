# SPDX-License-Identifier: Apache-2.0
"""When a run is saved."""

from pathlib import Path

from megatron.bridge.checkpoint import layout
from megatron.bridge.checkpoint.collective import on_first_rank
from megatron.bridge.training.callbacks.base import Callback
from megatron.bridge.training.checkpointing import save_run
from megatron.bridge.training.state import Run
from megatron.bridge.utils.errors import UserError


class Saving(Callback):
    """Saves every ``checkpoint.save_interval`` steps and after the last one, if ``checkpoint.save`` is set."""

    def __init__(self) -> None:
        self._saved: int | None = None

    def on_train_start(self, context: Run) -> None:
        """Find out now, not after hours, whether the folder can be written."""
        root = context.config.checkpoint.save
        if root is not None:
            on_first_rank(lambda: _check_writable(Path(root)))
            self._saved = on_first_rank(lambda: layout.latest_iteration(root))

    def on_train_step_end(self, context: Run) -> None:
        """Save if the step is due."""
        interval = context.config.checkpoint.save_interval
        if interval is not None and context.progress.step % interval == 0:
            self._save(context)

    def on_train_end(self, context: Run) -> None:
        """Save where the run ends, unless that was just done."""
        self._save(context)

    def _save(self, context: Run) -> None:
        if context.config.checkpoint.save is not None and context.progress.step != self._saved:
            save_run(context)
            self._saved = context.progress.step


def _check_writable(root: Path) -> None:
    probe = root / ".writable"
    try:
        root.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(
            f"checkpoint.save={root} cannot be written: {error.strerror}; choose a folder that can"
        ) from error
