# SPDX-License-Identifier: Apache-2.0
"""Skip the batches of steps that the user named, or in which an earlier start of the run found a persistent error."""

import json
from pathlib import Path

from megatron.bridge.checkpoint.collective import on_first_rank
from megatron.bridge.training.callbacks.base import Callback
from megatron.bridge.training.state import Run
from megatron.bridge.training.step.sequence_group import microbatches_of_step
from megatron.bridge.utils.console import print_rank_0

SKIPPED_FILE = "skipped_batches.json"


class SkipBatches(Callback):
    """Reads batches without training on them, and counts their steps as skipped."""

    def __init__(self) -> None:
        self._steps: set[int] = set()

    def on_train_start(self, context: Run) -> None:
        """Skip the configured steps, and those in which earlier starts of this run found a persistent error."""
        save = context.config.checkpoint.save
        persistent: dict[int, str] = (
            {} if save is None else on_first_rank(lambda: steps_to_skip(Path(save)))
        )
        self._steps = {*context.config.train.iterations_to_skip, *persistent}
        self._skip(context)

    def on_train_step_end(self, context: Run) -> None:
        """Skip the next steps; a run that stops here skips them when it resumes."""
        context.skipped_before = 0
        if context.stop_reason is None:
            self._skip(context)

    def _skip(self, run: Run) -> None:
        progress = run.progress
        train = run.config.train
        while progress.step + 1 in self._steps and progress.step < train.train_iters:
            for batches in run.train_batches:
                skipped, count = microbatches_of_step(batches, run.num_microbatches)
                for _ in range(count):
                    next(skipped)
            progress.step += 1
            progress.consumed_train_samples += run.batch_size
            progress.skipped_steps += 1
            run.skipped_before += 1
            print_rank_0(f"step {progress.step}: batch skipped")


def steps_to_skip(root: Path) -> dict[int, str]:
    """The steps to skip, from a run's folder, with the error of each."""
    try:
        return {
            int(step): error_text
            for step, error_text in json.loads((root / SKIPPED_FILE).read_text()).items()
        }
    except FileNotFoundError:
        return {}
