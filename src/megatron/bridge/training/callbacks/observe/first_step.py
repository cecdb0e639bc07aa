# SPDX-License-Identifier: Apache-2.0
"""How long a step takes, told while the first one is still being computed."""

import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from megatron.bridge.training.callbacks.base import Callback
from megatron.bridge.training.state import BatchIterator, Run
from megatron.bridge.utils.console import print_rank_0

LONG_STEP_SECONDS = 60.0
"""Shorter steps need no forecast: their first log line comes soon enough."""


class FirstStepForecast(Callback):
    """Prints how long a step takes as soon as its first microbatch has been computed, if that is long.

    Without it, a run whose global batch is too large for its machine shows nothing for hours. The time is that between
    the first two microbatches that are read, so it is given only where a stage reads them one after the other (no
    pipeline stages). It counts what the CPU waits for: on a GPU it is too short, and then no forecast appears.
    """

    def __init__(self) -> None:
        self._is_attached = False

    def on_train_step_start(self, context: Run) -> None:
        """Watch the batches of the first step of this process."""
        has_stages = (context.config.model.pipeline_model_parallel_size or 1) > 1
        if self._is_attached or has_stages:
            return
        self._is_attached = True
        context.train_batches = [
            self._watch(batches, context, context.num_microbatches)
            for batches in context.train_batches
        ]

    def _watch(
        self, batches: BatchIterator, run: Run, microbatches: int
    ) -> Iterator[dict[str, Any]]:
        first_read: float | None = None
        is_told = microbatches < 2
        for batch in batches:
            now = time.perf_counter()
            if first_read is None:
                first_read = now
            elif not is_told:
                is_told = True
                count = batch.get("microbatches", microbatches)
                forecast = describe_step(run, now - first_read, count)
                if forecast:
                    print_rank_0(forecast)
            yield batch


def describe_step(run: Run, microbatch_seconds: float, microbatches: int) -> str:
    """Return a line about the length of a step and of the run, or "" if a step is short.

    Args:
        run: The run, in its first step.
        microbatch_seconds: Time of one microbatch, forward and backward.
        microbatches: Microbatches of this rank in a step.
    """
    step_seconds = microbatch_seconds * microbatches
    if step_seconds < LONG_STEP_SECONDS:
        return ""
    steps = run.config.train.train_iters - run.progress.step
    return (
        f"note: a microbatch took {microbatch_seconds:.0f} s: a step of {microbatches} microbatches takes about "
        f"{timedelta(seconds=round(step_seconds))}, the remaining {steps:,} steps about "
        f"{timedelta(seconds=round(step_seconds * steps))}; a smaller train.global_batch_size makes steps shorter"
    )
