# SPDX-License-Identifier: Apache-2.0
"""Detect a hang, name the rank that causes it, and end the run.

A rank that is blocked in a collective is a victim; the culprit is the rank that did not enter it. A thread on each
rank publishes heartbeats through the torch.distributed store: how far the main thread is and which function it is
in. If no step makes progress within the timeout, each rank reads all heartbeats, names the culprit and dumps its
own stacks.
"""

import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from torch.distributed import distributed_c10d

from megatron.bridge.training.callbacks.base import Callback
from megatron.bridge.training.state import Run
from megatron.bridge.utils import distributed

HANG_EXIT_CODE = 76  # exit code of a rank that ended a hanging run. Launchers restart the run, as after any failure.
BEATS_PER_TIMEOUT = 5
STORE_TIMEOUT = 2.0  # seconds to wait for an answer of the store
_KEY = "megatron_bridge/hang"


@dataclass(frozen=True)
class Heartbeat:
    """What a rank publishes about itself."""

    beat: int  # number of the heartbeat; a stopped process sends no new ones
    phases: int  # number of completed phases of steps; a hanging rank completes none
    step: int
    where: str  # function, file and line of the main thread
    in_collective: bool


class HangDetection(Callback):
    """Ends a run that makes no progress for ``dist.hang_timeout_minutes``.

    One batch of an evaluation and one save each count as a phase: the timeout must be longer than either.
    """

    def __init__(self, minutes: float) -> None:
        self._seconds = 60 * minutes
        self._phases = 0
        self._step = 0
        self._stop = threading.Event()
        self._main = threading.main_thread().ident
        self._thread: threading.Thread | None = None

    def on_train_start(self, context: Run) -> None:
        """Start watching; a run of one process can hang, too."""
        self._main = threading.get_ident()
        self._thread = threading.Thread(target=self._watch, name="hang detection", daemon=True)
        self._thread.start()

    def on_train_step_start(self, context: Run) -> None:
        self._phases += 1
        self._step = context.progress.step

    on_grads_ready = on_train_step_end = on_train_end = on_train_step_start
    on_eval_step_end = on_test_step_end = on_train_step_start

    def close(self, context: Run) -> None:
        self._stop.set()

    def _watch(self) -> None:
        store = _HeartbeatStore()
        phases = -1
        since = time.monotonic()
        before: list[Heartbeat | None] = []
        while not self._stop.wait(self._seconds / BEATS_PER_TIMEOUT):
            if self._phases != phases:
                phases = self._phases
                since = time.monotonic()
                before = []
            store.publish(self._phases, self._step, *current_function(self._main))
            late = time.monotonic() - since - self._seconds
            if late > 0 and not before:
                before = store.heartbeats()
            elif (
                late > 2 * self._seconds / BEATS_PER_TIMEOUT
            ):  # every live rank has sent another heartbeat by now
                self._end(store.agree(find_culprit(before, store.heartbeats())))

    def _end(self, verdict: str) -> None:
        sys.stderr.write(
            f"rank {distributed.rank()}: step {self._step + 1} has been hanging for {self._seconds:.0f} s: "
            f"{verdict}; stacks:\n"
        )
        faulthandler.dump_traceback(sys.stderr)
        sys.stderr.flush()
        # give the other ranks time to dump their stacks: when this rank exits, the launcher ends them
        self._stop.wait(self._seconds / BEATS_PER_TIMEOUT)
        os._exit(HANG_EXIT_CODE)  # the main thread cannot be interrupted


def find_culprit(before: Sequence[Heartbeat | None], after: Sequence[Heartbeat | None]) -> str:
    """Name the rank that the others wait for, from two rounds of heartbeats.

    Example:
        >>> stuck, busy = Heartbeat(5, 7, 3, "wait", True), Heartbeat(5, 6, 3, "load (data.py:9)", False)
        >>> later = [Heartbeat(7, 7, 3, "wait", True), Heartbeat(7, 6, 3, "load (data.py:9)", False)]
        >>> find_culprit([stuck, busy], later)
        'the other ranks are waiting for rank 1, which is in load (data.py:9)'
    """
    silent = [
        rank
        for rank, (old, new) in enumerate(zip(before, after, strict=True))
        if new is None or old == new
    ]
    if silent:
        return f"{_rank_list(silent)} sends no heartbeat: stopped, dead or disconnected"
    beats = [beat for beat in after if beat is not None]
    busy = [rank for rank, beat in enumerate(beats) if not beat.in_collective]
    if busy and len(busy) < len(beats):
        locations = "; ".join(beats[rank].where for rank in busy)
        return f"the other ranks are waiting for {_rank_list(busy)}, which is in {locations}"
    fewest_phases = min(beat.phases for beat in beats)
    behind = [rank for rank, beat in enumerate(beats) if beat.phases == fewest_phases]
    if len(behind) < len(beats):
        return f"{_rank_list(behind)} is behind the others, in {beats[behind[0]].where}"
    return f"all ranks are in {beats[0].where}"


def current_function(thread: int | None) -> tuple[str, bool]:
    """The function that a thread is in, and whether it is inside a collective."""
    frame = sys._current_frames().get(thread or 0)  # pyright: ignore[reportPrivateUsage]
    location = "nowhere"
    if frame is not None:
        location = (
            f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"
        )
    while frame is not None:
        if f"{os.sep}torch{os.sep}distributed{os.sep}" in frame.f_code.co_filename:
            return location, True
        frame = frame.f_back
    return location, False


def _rank_list(ranks: Sequence[int]) -> str:
    return f"rank {', '.join(map(str, ranks))}"


def _new_store_connection() -> Any:
    """The store over a new connection: the main thread may be blocked on the existing one."""
    store: Any = (
        cast(Any, distributed_c10d)._get_default_store() if distributed.is_initialized() else None
    )
    return store.clone() if hasattr(store, "clone") else store


class _HeartbeatStore:
    """Heartbeats in the torch.distributed store; the process that hosts the store may be the one that hangs."""

    def __init__(self) -> None:
        self._store: Any = None
        self._own = Heartbeat(0, 0, 0, "nowhere", False)

    def publish(self, phases: int, step: int, location: str, in_collective: bool) -> None:
        if self._store is None:
            self._store = self._with_timeout(_new_store_connection)
        self._own = beat = Heartbeat(self._own.beat + 1, phases, step, location, in_collective)
        self._with_timeout(
            lambda: self._store.set(f"{_KEY}/{distributed.rank()}", json.dumps(asdict(beat)))
        )

    def agree(self, verdict: str) -> str:
        """What the first rank found; ranks that look later may not see the culprit any more."""
        answer = self._with_timeout(lambda: self._store.compare_set(f"{_KEY}/verdict", "", verdict))
        return answer.decode() if answer else verdict

    def heartbeats(self) -> list[Heartbeat | None]:
        """The last heartbeat of each rank; None where a rank sent none."""
        beats: list[Heartbeat | None] = (
            self._with_timeout(self._read) or [None] * distributed.world_size()
        )
        beats[distributed.rank()] = self._own
        return beats

    def _read(self) -> list[Heartbeat | None]:
        keys = [f"{_KEY}/{rank}" for rank in range(distributed.world_size())]
        texts = [self._store.get(key) if self._store.check([key]) else None for key in keys]
        return [None if text is None else Heartbeat(**json.loads(text)) for text in texts]

    @staticmethod
    def _with_timeout(call: Callable[[], Any]) -> Any:
        """The result of ``call``, or None if the store does not answer within ``STORE_TIMEOUT``."""
        answers: list[Any] = []

        def run() -> None:
            with suppress(Exception):
                answers.append(call())

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(STORE_TIMEOUT)
        return answers[0] if answers else None
