# SPDX-License-Identifier: Apache-2.0
"""A function mapped over many items by worker processes, with results in the order of the items."""

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any

from megatron.bridge.utils.errors import UserError
from megatron.bridge.utils.processes import die_with_parent

_function: Callable[[Any], Any] | None = (
    None  # inherited by forked workers, so that none loads a tokenizer again
)


@contextmanager
def ordered_map[T, R](
    function: Callable[[T], R], workers: int
) -> Iterator[Callable[[Iterable[T]], Iterator[R]]]:
    """Yield a ``map`` for ``function`` that uses ``workers`` processes. One worker stands for this process."""
    if workers == 1:
        yield lambda items: map(function, items)
        return
    global _function  # noqa: PLW0603
    _function = function
    with ProcessPoolExecutor(
        workers, multiprocessing.get_context("fork"), initializer=_use_one_thread
    ) as pool:
        try:
            yield lambda items: _in_order(pool, items, 2 * workers)
        except BrokenProcessPool as error:
            raise UserError(
                "a worker process was killed, probably for memory: use fewer workers"
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)
            _function = None


def _call_function(item: Any) -> Any:
    assert _function is not None
    return _function(item)


def _use_one_thread() -> None:
    """The processes are the parallelism; threads within each would compete for the same cores."""
    die_with_parent(signal.SIGKILL)  # it would wait for work forever
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _in_order(pool: ProcessPoolExecutor, items: Iterable[Any], ahead: int) -> Iterator[Any]:
    """Results in the order of the items, at most ``ahead`` of them in memory."""
    waiting: deque[Future[Any]] = deque()
    for item in items:
        waiting.append(pool.submit(_call_function, item))
        if len(waiting) >= ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()
