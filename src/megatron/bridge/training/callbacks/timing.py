# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingTypeStubs=false
"""Where the time of a step goes."""

import copy
import time
from collections.abc import Iterator
from typing import Any, cast

from megatron.core import utils
from megatron.core.timers import Timers

from megatron.bridge.training.callbacks.measures import Numbers, longest
from megatron.bridge.training.config import LoggerConfig
from megatron.bridge.training.optimizer import parts
from megatron.bridge.training.state import Batches, Run
from megatron.bridge.utils import dist

PREFIX = "time/"


class StepTimers:
    """Megatron-Core's timers, in its schedules and optimizers, while training steps run.

    An evaluation runs the same schedules; the timers are away then.
    """

    def __init__(self, config: LoggerConfig) -> None:
        self._option = config.timing_log_option
        self._level = config.timing_log_level
        self._timers: Any = Timers(self._level, "max") if self._level else None
        self._owners: list[Any] = []

    def attach(self, run: Run) -> None:
        """Put them where Megatron-Core looks for them."""
        if self._timers is None:
            return
        self._owners = [cast(Any, utils).get_model_config(chunk) for chunk in run.model]
        for optimizer in [cast(Any, run.optimizer), *parts(run.optimizer)]:
            optimizer.config = copy.copy(optimizer.config)  # the run's own is written to YAML
            self._owners.append(optimizer.config)
        self.resume()

    def pause(self) -> None:
        """Take them away."""
        for owner in self._owners:
            owner.timers = None

    def resume(self) -> None:
        """Put them back."""
        for owner in self._owners:
            owner.timers = self._timers

    def start_optimizer(self) -> None:
        """The gradients are ready."""
        if self._timers is not None:
            self._timers("optimizer", log_level=1).start()

    def stop_optimizer(self) -> None:
        """The step is over; it may have ended before its gradients were ready."""
        if self._timers is not None and self._timers("optimizer", log_level=1)._started:
            self._timers("optimizer").stop()

    def read(self, steps: int) -> Numbers:
        """Seconds a step since the last call, over ranks as ``timing_log_option`` says; all ranks call this."""
        if self._timers is None:
            return {}
        mine = {name: timer.elapsed(reset=True) / steps for name, timer in self._timers._timers.items()}
        everyone = dist.all_gather_object(mine)
        names = dict.fromkeys(name for times in everyone for name in times)  # stages have different ones
        numbers: Numbers = {}
        for name in names:
            # a stage without a part has no time for it
            times = {rank: found[name] for rank, found in enumerate(everyone) if found.get(name)}
            numbers |= _over_ranks(f"{PREFIX}{name}", times, self._option)
        return numbers


def _over_ranks(name: str, times: dict[int, float], option: str) -> Numbers:
    if not times:
        return {}
    if option == "all":
        return {f"{name} rank {rank}": seconds for rank, seconds in times.items()}
    numbers: Numbers = {name: max(times.values())}
    return numbers | ({f"{name} min": min(times.values())} if option == "minmax" else {})


class DataWait:
    """How long a step waits for its data; needs no synchronisation with the device."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._attached = False

    def attach(self, run: Run) -> None:
        """Watch the training batches of this rank; to be called when all callbacks have put theirs in place."""
        if not self._attached:
            run.train_batches = [self._watched(batches) for batches in run.train_batches]
            self._attached = True

    def _watched(self, batches: Batches) -> Iterator[dict[str, Any]]:
        while True:
            started = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self._seconds += time.perf_counter() - started
            yield batch

    def read(self, steps: int) -> Numbers:
        """Seconds a step since the last call, of the rank that waited longest; all ranks call this."""
        seconds, self._seconds = self._seconds / steps, 0.0
        return {"data wait": longest(seconds)}
