# SPDX-License-Identifier: Apache-2.0
"""When a run saves checkpoints, and their Hugging Face copies."""

from pathlib import Path

from megatron.bridge.checkpoint import paths, saving
from megatron.bridge.checkpoint.async_writer import AsyncSaver
from megatron.bridge.checkpoint.collective import on_first_rank
from megatron.bridge.checkpoint.nvrx_writer import NvrxAsyncSaver
from megatron.bridge.models.conversion.pretrained import is_megatron_checkpoint
from megatron.bridge.training.callbacks.base import Callback
from megatron.bridge.training.checkpointing import hf_copy, non_persistent, save_load
from megatron.bridge.training.checkpointing.hf_copy import CopyProcess
from megatron.bridge.training.state import Run
from megatron.bridge.utils import distributed
from megatron.bridge.utils.console import print_rank_0
from megatron.bridge.utils.errors import UserError


class CheckpointSaving(Callback):
    """Saves every ``checkpoint.save_interval`` steps and after the last one, if ``checkpoint.save`` is set."""

    def __init__(self) -> None:
        self._saved: int | None = None  # newest step that is on disk
        self._started: int | None = None  # last step whose persistent save began
        self._background: AsyncSaver | None = None
        # name of the run for non-persistent checkpoints; None: there are none
        self._name: str | None = None

    def on_train_start(self, context: Run) -> None:
        """Prepare the saves, and refuse a model that could not be saved after the last step."""
        config = context.config.checkpoint
        if config.save is not None:
            save_load.check_save(context)
            root = Path(config.save)
            step = context.progress.step
            self._saved = step if on_first_rank(lambda: _is_newest(root, step)) else None
            self._background = _background_writer(context) if config.async_save else None
            if config.non_persistent_ckpt_type is not None:
                self._name = on_first_rank(lambda: non_persistent.run_name(root, make=True))

    def on_train_step_end(self, context: Run) -> None:
        """Publish what the background writer has finished; save if a checkpoint is due."""
        if self._background is not None:
            self._background.poll()
        config = context.config.checkpoint
        is_best = config.keep_best and context.best_step == context.progress.step
        if context.is_due(config.save_interval) or is_best:
            self._save(context)
        elif self._name is not None and context.is_due(config.non_persistent_save_interval):
            save_load.save_non_persistent(context, self._name, self._started)

    def on_train_end(self, context: Run) -> None:
        """Save the last step, unless it was just saved, and wait for the background writer."""
        self._save(context)
        if self._background is not None:
            self._background.poll(wait=True)
        if self._name is not None:
            save_load.remove_non_persistent(context, self._name)
        if self._saved is not None:
            root = Path(str(context.config.checkpoint.save))
            if context.config.checkpoint.keep_best and context.best_step == self._saved:
                # found by the evaluation after the last step, which may have been saved before
                on_first_rank(lambda: paths.write_best(root, context.progress.step))
            directory = paths.iteration_dir(root, self._saved)
            print_rank_0(f"checkpoint: {directory}")

    def close(self, context: Run) -> None:
        if self._background is not None:
            self._background.abort()  # after an error, an unfinished checkpoint is never published

    def _save(self, context: Run) -> None:
        step = context.progress.step
        if context.config.checkpoint.save is not None and step != self._saved:
            self._started = step
            save_load.save_run(context, self._background)
            self._saved = step


def _background_writer(run: Run) -> AsyncSaver:
    """A background writer with enough reserved memory for one checkpoint."""
    background = (
        NvrxAsyncSaver() if run.config.checkpoint.async_strategy == "nvrx" else AsyncSaver()
    )
    background.reserve(saving.host_buffer_size(save_load.run_state(run)))
    return background


def _is_newest(root: Path, step: int) -> bool:
    """Whether ``step`` is the newest checkpoint in the run's own folder."""
    try:
        return paths.latest_iteration(root) == step
    except UserError:
        return False


PATIENCE = 10.0  # seconds for which rank 0 waits before it tells the others that it still waits


class HFCopies(Callback):
    """With ``also_save_hf_checkpoint``, rank 0 makes a Hugging Face copy of each published checkpoint, one by one."""

    def __init__(self) -> None:
        self._running: CopyProcess | None = None
        self._failed: set[Path] = set()
        self._seen: int | None = None

    def on_train_step_end(self, context: Run) -> None:
        """Start a copy if a checkpoint was published meanwhile and no other copy is being made."""
        if distributed.rank() == 0 and (self._running is not None or self._is_new(context)):
            self._advance(context, 0.0)

    def on_train_end(self, context: Run) -> None:
        """Wait for all copies, unless the run is about to be restarted: it makes them when it goes on."""
        if context.requeue:
            return
        while not distributed.all_ranks_agree(
            distributed.rank() != 0 or self._advance(context, PATIENCE)
        ):
            pass

    def close(self, context: Run) -> None:
        if self._running is not None:
            self._running.let_go()
            self._running = None

    def _is_new(self, context: Run) -> bool:
        """Whether the tracker was written since it was asked last."""
        tracker = _root(context) / paths.TRACKER
        before = self._seen
        self._seen = tracker.stat().st_mtime_ns if tracker.is_file() else None
        return self._seen != before

    def _advance(self, context: Run, patience: float) -> bool:
        """Finish the copy that is being made and start the next; return True if no copy is pending."""
        root = _root(context)
        config = context.config.checkpoint
        if self._running is not None and not self._is_finished(self._running, patience):
            return False
        hf_copy.clean(root)
        pending = [
            iteration
            for iteration in hf_copy.missing(root)
            if hf_copy.copy_dir(root, iteration) not in self._failed
        ]
        if not pending:
            return True
        source = config.pretrained_checkpoint  # of the tokenizer and the other files
        if source is not None and is_megatron_checkpoint(source):
            source = None
        self._running = CopyProcess(root, pending[0], source, config.trust_checkpoint)
        return False

    def _is_finished(self, copy: CopyProcess, patience: float) -> bool:
        code = copy.wait(patience)
        if code is None:
            return False
        if code == 0:
            print_rank_0(f"Hugging Face copy: {copy.folder}")
        elif copy.checkpoint.is_dir():  # else the run has deleted it meanwhile
            self._failed.add(copy.folder)
            print_rank_0(
                f"no Hugging Face copy of {copy.checkpoint}: {copy.reason()}; the run goes on, export it with "
                "megatron-bridge export"
            )
        copy.let_go()
        self._running = None
        return True


def _root(context: Run) -> Path:
    return Path(str(context.config.checkpoint.save))
