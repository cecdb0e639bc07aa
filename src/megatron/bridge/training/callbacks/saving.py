# SPDX-License-Identifier: Apache-2.0
"""When a run is saved."""

from pathlib import Path

from megatron.bridge.checkpoint import layout, lock, saving
from megatron.bridge.checkpoint.background import Background
from megatron.bridge.checkpoint.collective import on_first_rank
from megatron.bridge.checkpoint.nvrx import NvrxBackground
from megatron.bridge.training import non_persistent
from megatron.bridge.training.callbacks.base import Callback
from megatron.bridge.training.checkpointing import forget_between, run_state, save_between, save_run
from megatron.bridge.training.state import Run
from megatron.bridge.utils import dist
from megatron.bridge.utils.errors import UserError


class Saving(Callback):
    """Saves every ``checkpoint.save_interval`` steps and after the last one, if ``checkpoint.save`` is set.

    From the first step to the end, the folder is this run's: another run that would write there is refused.
    """

    def __init__(self) -> None:
        self._saved: int | None = None
        self._started: int | None = None
        self._background: Background | None = None
        self._root: Path | None = None
        self._name: str | None = None

    def on_train_start(self, context: Run) -> None:
        """Find out now, not after hours, whether the folder can be written."""
        config = context.config.checkpoint
        if config.save is not None:
            self._root = root = Path(config.save)
            on_first_rank(lambda: _take(root))
            step = context.progress.step
            self._saved = step if on_first_rank(lambda: _is_newest(root, step)) else None
            self._background = _reserved(context) if config.async_save else None
            if config.non_persistent_ckpt_type is not None:
                self._name = on_first_rank(lambda: non_persistent.run_name(root, make=True))

    def on_train_step_end(self, context: Run) -> None:
        """Publish what the background has written; save if the step is due."""
        if self._background is not None:
            self._background.poll()
        config, step = context.config.checkpoint, context.progress.step
        if _is_due(config.save_interval, step):
            self._save(context)
        elif self._name is not None and _is_due(config.non_persistent_save_interval, step):
            save_between(context, self._name, self._started)

    def on_train_end(self, context: Run) -> None:
        """Save where the run ends, unless that was just done; wait for the background."""
        self._save(context)
        if self._background is not None:
            self._background.poll(wait=True)
        if self._name is not None:
            forget_between(context, self._name)

    def close(self, context: Run) -> None:
        """Let the folder go; what the background has not published by now, after an error, never appears."""
        if self._background is not None:
            self._background.abort()
        if self._root is not None and dist.rank() == 0:
            lock.release(self._root)

    def _save(self, context: Run) -> None:
        step = context.progress.step
        if context.config.checkpoint.save is not None and step != self._saved:
            self._started = step
            save_run(context, self._background)
            self._saved = step


def _is_due(interval: int | None, step: int) -> bool:
    return interval is not None and step % interval == 0


def _reserved(run: Run) -> Background:
    """A background with memory for the whole of a save."""
    background = NvrxBackground() if run.config.checkpoint.async_strategy == "nvrx" else Background()
    background.reserve(saving.memory_for(run_state(run)))
    return background


def _is_newest(root: Path, step: int) -> bool:
    """Whether the run stands at the newest checkpoint of its own folder."""
    try:
        return layout.latest_iteration(root) == step
    except UserError:
        return False


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
