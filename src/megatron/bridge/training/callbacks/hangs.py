# SPDX-License-Identifier: Apache-2.0
"""A run that hangs says which rank it waits for, and ends.

A rank that is stuck in a collective is a victim: the culprit is the one that did not come. Each rank tells, from a
thread of its own and through torch's store, how far its main thread is and in which function. When nothing has
moved for the timeout, every rank that still can reads all of that, names the culprit, and dumps its stacks.
"""

import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, cast

from torch.distributed import distributed_c10d

from megatron.bridge.training.callbacks.base import Callback
from megatron.bridge.training.state import Run
from megatron.bridge.utils import dist

# Exit code of a rank that ended a run that hung; launchers start it again like after any failure.
HUNG = 76
# Signs of life within one timeout.
BEATS = 5
# Seconds until the store must answer.
PATIENCE = 2.0
_KEY = "megatron_bridge/hang"


@dataclass(frozen=True)
class Sign:
    """What a rank tells about itself.

    Attributes:
        beat: Counts the signs: a process that is stopped gives no new ones.
        moves: Counts phases of steps: what hangs does not move.
        step: Steps done.
        where: Function, file and line of the main thread.
        waits: Whether that is inside a collective.
    """

    beat: int
    moves: int
    step: int
    where: str
    waits: bool


class HangDetection(Callback):
    """Ends a run in which no step moves on for ``dist.hang_timeout_minutes``.

    A batch of an evaluation and a save count as one move each: the timeout must be longer than either.
    """

    def __init__(self, minutes: float) -> None:
        self._seconds = 60 * minutes
        self._moves = 0
        self._step = 0
        self._stop = threading.Event()
        self._main = threading.main_thread().ident
        self._thread: threading.Thread | None = None

    def on_train_start(self, context: Run) -> None:
        """Start to watch; a process alone has nobody to wait for, but may hang, too."""
        self._main = threading.get_ident()
        self._thread = threading.Thread(target=self._watch, name="hang detection", daemon=True)
        self._thread.start()

    def on_train_step_start(self, context: Run) -> None:
        """The run moves."""
        self._moves += 1
        self._step = context.progress.step

    on_grads_ready = on_train_step_end = on_train_end = on_train_step_start
    on_eval_step_end = on_test_step_end = on_train_step_start

    def close(self, context: Run) -> None:
        """Stop to watch."""
        self._stop.set()

    def _watch(self) -> None:
        store = _Store()
        moves, since = -1, time.monotonic()
        before: list[Sign | None] = []
        while not self._stop.wait(self._seconds / BEATS):
            if self._moves != moves:
                moves, since, before = self._moves, time.monotonic(), []
            store.tell(self._moves, self._step, *whereabouts(self._main))
            late = time.monotonic() - since - self._seconds
            if late > 0 and not before:
                before = store.signs()
            elif late > 2 * self._seconds / BEATS:  # who is alive has given another sign since
                self._end(store.agree(verdict(before, store.signs())))

    def _end(self, found: str) -> None:
        sys.stderr.write(
            f"rank {dist.rank()}: step {self._step + 1} hangs since {self._seconds:.0f} s: {found}; stacks:\n"
        )
        faulthandler.dump_traceback(sys.stderr)
        sys.stderr.flush()
        self._stop.wait(self._seconds / BEATS)  # for the others to do the same; the launcher ends them then
        os._exit(HUNG)  # the main thread cannot be reached


def verdict(before: Sequence[Sign | None], after: Sequence[Sign | None]) -> str:
    """Which rank the others wait for, from two rounds of signs.

    Example:
        >>> stuck, busy = Sign(5, 7, 3, "wait", True), Sign(5, 6, 3, "load (data.py:9)", False)
        >>> later = [Sign(7, 7, 3, "wait", True), Sign(7, 6, 3, "load (data.py:9)", False)]
        >>> verdict([stuck, busy], later)
        'rank 1 is the one the others wait for; it is in load (data.py:9)'
    """
    silent = [rank for rank, (old, new) in enumerate(zip(before, after, strict=True)) if new is None or old == new]
    if silent:
        return f"{_ranks(silent)} gives no sign of life: stopped, dead or cut off"
    signs = [sign for sign in after if sign is not None]
    busy = [rank for rank, sign in enumerate(signs) if not sign.waits]
    if busy and len(busy) < len(signs):
        where = "; ".join(signs[rank].where for rank in busy)
        return f"{_ranks(busy)} is the one the others wait for; it is in {where}"
    least = min(sign.moves for sign in signs)
    behind = [rank for rank, sign in enumerate(signs) if sign.moves == least]
    if len(behind) < len(signs):
        return f"{_ranks(behind)} is behind the others, in {signs[behind[0]].where}"
    return f"all ranks are in {signs[0].where}"


def whereabouts(thread: int | None) -> tuple[str, bool]:
    """The function that a thread is in, and whether it waits in a collective."""
    frame = sys._current_frames().get(thread or 0)  # pyright: ignore[reportPrivateUsage]
    where = "nowhere" if frame is None else _name(frame)
    while frame is not None:
        if f"{os.sep}torch{os.sep}distributed{os.sep}" in frame.f_code.co_filename:
            return where, True
        frame = frame.f_back
    return where, False


def _name(frame: FrameType) -> str:
    code = frame.f_code
    return f"{code.co_name} ({Path(code.co_filename).name}:{frame.f_lineno})"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {', '.join(map(str, ranks))}"


def _own_connection() -> Any:
    """The store, not over the connection that the main thread may be waiting in."""
    store: Any = cast(Any, distributed_c10d)._get_default_store() if dist.is_initialized() else None
    return store.clone() if hasattr(store, "clone") else store


class _Store:
    """Torch's store; the process that keeps it may be the one that hangs."""

    def __init__(self) -> None:
        self._store: Any = None
        self._own = Sign(0, 0, 0, "nowhere", False)

    def tell(self, moves: int, step: int, where: str, waits: bool) -> None:
        """Publish this rank's sign."""
        if self._store is None:
            self._store = self._ask(_own_connection)  # answered by that process, too
        self._own = sign = Sign(self._own.beat + 1, moves, step, where, waits)
        self._ask(lambda: self._store.set(f"{_KEY}/{dist.rank()}", json.dumps(asdict(sign))))

    def agree(self, found: str) -> str:
        """What the first rank found that looked: those that look later miss it."""
        answer = self._ask(lambda: self._store.compare_set(f"{_KEY}/verdict", "", found))
        return answer.decode() if answer else found

    def signs(self) -> list[Sign | None]:
        """The last sign of each rank; None of those that gave none."""
        found: list[Sign | None] = self._ask(self._read) or [None] * dist.world_size()
        found[dist.rank()] = self._own
        return found

    def _read(self) -> list[Sign | None]:
        keys = [f"{_KEY}/{rank}" for rank in range(dist.world_size())]
        texts = [self._store.get(key) if self._store.check([key]) else None for key in keys]
        return [None if text is None else Sign(**json.loads(text)) for text in texts]

    @staticmethod
    def _ask(question: Any) -> Any:
        """The answer, or None after a while: the process that keeps the store may hang."""
        answers: list[Any] = []

        def ask() -> None:
            try:
                answers.append(question())
            except Exception:
                answers.append(None)

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(PATIENCE)
        return answers[0] if answers else None
