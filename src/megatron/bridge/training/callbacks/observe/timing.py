# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingTypeStubs=false
"""Timers of the parts of a step."""

import copy
import time
from collections.abc import Iterator
from typing import Any, cast

from megatron.core import utils
from megatron.core.timers import Timers

from megatron.bridge.training.callbacks.observe.metrics import Metrics
from megatron.bridge.training.config import LoggerConfig
from megatron.bridge.training.optim.optimizer import megatron_optimizers
from megatron.bridge.training.state import BatchIterator, Run
from megatron.bridge.utils import distributed

PREFIX = "time/"


class StepTimers:
    """Megatron-Core's timers in its schedules and optimizers; paused during evaluations, which share schedules."""

    def __init__(self, config: LoggerConfig) -> None:
        self._option = config.timing_log_option
        self._level = config.timing_log_level
        self._timers: Any = Timers(self._level, "max") if self._level else None
        self._owners: list[Any] = []

    def attach(self, run: Run) -> None:
        """Set the timers in the configs in which Megatron-Core looks for them."""
        if self._timers is None:
            return
        self._owners = [cast(Any, utils).get_model_config(chunk) for chunk in run.model]
        for optimizer in [cast(Any, run.optimizer), *megatron_optimizers(run.optimizer)]:
            optimizer.config = copy.copy(optimizer.config)  # the original is written to YAML
            self._owners.append(optimizer.config)
        self.resume()

    def pause(self) -> None:
        for owner in self._owners:
            owner.timers = None

    def resume(self) -> None:
        for owner in self._owners:
            owner.timers = self._timers

    def start_optimizer(self) -> None:
        if self._timers is not None:
            self._timers("optimizer", log_level=1).start()

    def stop_optimizer(self) -> None:
        """Stop the timer, unless the step ended before its gradients were ready."""
        if self._timers is not None and self._timers("optimizer", log_level=1)._started:
            self._timers("optimizer").stop()

    def read(self, steps: int) -> Metrics:
        """Seconds per step since the last call, reduced by ``timing_log_option``; to be called on all ranks."""
        if self._timers is None:
            return {}
        mine = {name: timer.elapsed(reset=True) / steps for name, timer in self._timers._timers.items()}
        everyone = distributed.all_gather_object(mine)
        names = dict.fromkeys(name for times in everyone for name in times)  # stages have different ones
        numbers: Metrics = {}
        for name in names:
            # a pipeline stage that does not run this part has no time for it
            times = {rank: found[name] for rank, found in enumerate(everyone) if found.get(name)}
            numbers |= _over_ranks(f"{PREFIX}{name}", times, self._option)
        return numbers


def _over_ranks(name: str, times: dict[int, float], option: str) -> Metrics:
    if not times:
        return {}
    if option == "all":
        return {f"{name} rank {rank}": seconds for rank, seconds in times.items()}
    numbers: Metrics = {name: max(times.values())}
    return numbers | ({f"{name} min": min(times.values())} if option == "minmax" else {})


class DataWait:
    """The time for which a step waits for its data; needs no device synchronization."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._attached = False

    def attach(self, run: Run) -> None:
        """Time the training batches of this rank; call after all callbacks have replaced ``train_batches``."""
        if not self._attached:
            run.train_batches = [self._timed(batches) for batches in run.train_batches]
            self._attached = True

    def _timed(self, batches: BatchIterator) -> Iterator[dict[str, Any]]:
        while True:
            started = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self._seconds += time.perf_counter() - started
            yield batch

    def read(self, steps: int) -> Metrics:
        """Seconds per step since the last call, the maximum over ranks; call on all ranks."""
        seconds, self._seconds = self._seconds / steps, 0.0
        return {"data wait": distributed.reduce_numbers([seconds], "MAX")[0]}
