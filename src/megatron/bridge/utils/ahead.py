# SPDX-License-Identifier: Apache-2.0
"""Results computed by threads while the ones before are used, within a bound on memory."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor


def ahead[T](calls: Iterable[tuple[int, Callable[[], T]]], limit: int, threads: int) -> Iterator[T]:
    """The results of ``calls``, in their order.

    At most ``limit`` bytes of results exist at a time, or one result that is larger. The one that was yielded last
    counts until the next is asked for, so the caller has let go of it by then.

    Args:
        calls: (bytes of the result, what computes it).
        limit: Bytes.
        threads: How many compute.

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
