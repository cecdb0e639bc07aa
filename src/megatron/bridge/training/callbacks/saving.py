# SPDX-License-Identifier: Apache-2.0
"""When a run is saved."""

from pathlib import Path

from megatron.bridge.checkpoint import layout, saving
from megatron.bridge.checkpoint.background import Background
from megatron.bridge.checkpoint.collective import on_first_rank
from megatron.bridge.checkpoint.nvrx import NvrxBackground
from megatron.bridge.training import non_persistent
from megatron.bridge.training.callbacks.base import Callback
from megatron.bridge.training.checkpointing import forget_between, run_state, save_between, save_run
from megatron.bridge.training.state import Run
from megatron.bridge.utils.console import console
from megatron.bridge.utils.errors import UserError


class Saving(Callback):
    """Saves every ``checkpoint.save_interval`` steps and after the last one, if ``checkpoint.save`` is set."""

    def __init__(self) -> None:
        self._saved: int | None = None
        self._started: int | None = None
        self._background: Background | None = None
        self._name: str | None = None

    def on_train_start(self, context: Run) -> None:
        """See where the folder stands."""
        config = context.config.checkpoint
        if config.save is not None:
            root, step = Path(config.save), context.progress.step
            self._saved = step if on_first_rank(lambda: _is_newest(root, step)) else None
            self._background = _reserved(context) if config.async_save else None
            if config.non_persistent_ckpt_type is not None:
                self._name = on_first_rank(lambda: non_persistent.run_name(root, make=True))

    def on_train_step_end(self, context: Run) -> None:
        """Publish what the background has written; save if the step is due."""
        if self._background is not None:
            self._background.poll()
        config = context.config.checkpoint
        if context.is_due(config.save_interval):
            self._save(context)
        elif self._name is not None and context.is_due(config.non_persistent_save_interval):
            save_between(context, self._name, self._started)

    def on_train_end(self, context: Run) -> None:
        """Save where the run ends, unless that was just done; wait for the background."""
        self._save(context)
        if self._background is not None:
            self._background.poll(wait=True)
        if self._name is not None:
            forget_between(context, self._name)
        if self._saved is not None:
            place = layout.iteration_dir(Path(str(context.config.checkpoint.save)), self._saved)
            console().print(f"checkpoint: {place}", markup=False)

    def close(self, context: Run) -> None:
        """What the background has not published by now, after an error, never appears."""
        if self._background is not None:
            self._background.abort()

    def _save(self, context: Run) -> None:
        step = context.progress.step
        if context.config.checkpoint.save is not None and step != self._saved:
            self._started = step
            save_run(context, self._background)
            self._saved = step


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
