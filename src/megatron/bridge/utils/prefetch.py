# SPDX-License-Identifier: Apache-2.0
"""Results computed by threads while the ones before are used: within a bound on memory, or one at a time."""

import atexit
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue

PATIENCE = 10.0  # seconds that the end of the process waits for an item that is being made

_running: weakref.WeakKeyDictionary[threading.Thread, SimpleQueue[bool]] = weakref.WeakKeyDictionary()


def prefetch[T](calls: Iterable[tuple[int, Callable[[], T]]], limit: int, threads: int) -> Iterator[T]:
    """The results of ``calls``, in their order.

    At most ``limit`` bytes of results exist at a time, or one result that is larger. The one that was yielded last
    counts until the next is asked for, so the caller has let go of it by then.

    Args:
        calls: (bytes of the result, what computes it).

    Raises:
        BaseException: what a call raised, in its turn; those after it are not begun.
    """
    waiting: deque[tuple[int, Future[T]]] = deque()
    held = 0
    pool = ThreadPoolExecutor(threads)
    try:
        for size, call in calls:
            while waiting and held + size > limit:
                freed, future = waiting.popleft()
                yield future.result()
                del future
                held -= freed
            waiting.append((size, pool.submit(call)))
            held += size
        while waiting:
            yield waiting.popleft()[1].result()
    finally:
        pool.shutdown(cancel_futures=True)


class PrefetchIterator[T]:
    """The items of an iterator, each made by a thread while the caller uses the one before.

    Only that thread uses the iterator. It begins at once, and ends with the last item, with an error, or when this
    object is closed or let go of.

    Args:
        items: The iterator; what it raises is raised where its item would have come, and again after that.
    """

    def __init__(self, items: Iterator[T]) -> None:
        # queues in C: taking an item that is there and asking for the next one costs 2 microseconds
        self._wanted: SimpleQueue[bool] = SimpleQueue()
        self._made: SimpleQueue[tuple[T] | BaseException] = SimpleQueue()
        self.close = weakref.finalize(self, self._wanted.put, False)
        self._wanted.put(True)
        thread = threading.Thread(target=_make, args=(items, self._wanted, self._made), name="one ahead", daemon=True)
        _running[thread] = self._wanted
        thread.start()

    def __iter__(self) -> "PrefetchIterator[T]":
        return self

    def __next__(self) -> T:
        made = self._made.get()
        if isinstance(made, BaseException):
            self._made.put(made)
            raise made
        self._wanted.put(True)
        return made[0]


def _make[T](items: Iterator[T], wanted: SimpleQueue[bool], made: SimpleQueue[tuple[T] | BaseException]) -> None:
    try:
        while wanted.get():
            made.put((next(items),))
    except BaseException as error:  # the end of the items, too
        made.put(error)


@atexit.register
def _end_all() -> None:
    """End the threads before the interpreter: one that lets go of a tensor meanwhile aborts the process."""
    for thread, wanted in list(_running.items()):
        wanted.put(False)
        thread.join(PATIENCE)
