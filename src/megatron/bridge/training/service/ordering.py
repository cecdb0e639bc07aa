# SPDX-License-Identifier: Apache-2.0
"""The order of a model's requests, and results that are fetched later."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from megatron.bridge.utils.errors import UserError

Operation = Callable[[], Awaitable[Any]]

KEPT_SECONDS = 3600.0
"""How long a result can be fetched."""


class Turns:
    """Runs the operations of one model one after another, in the order of their numbers, which begin with 1."""

    def __init__(self) -> None:
        self._next = 1
        self._early: dict[int, tuple[Operation, asyncio.Future[Any]]] = {}
        self._ready: asyncio.Queue[tuple[Operation, asyncio.Future[Any]]] = asyncio.Queue()
        self._task = asyncio.create_task(self._work())

    def submit(self, number: int | None, operation: Operation) -> asyncio.Future[Any]:
        """Queue an operation; without a number, it follows those that are ready.

        Raises:
            UserError: The number has had its turn.
        """
        result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if number is None:
            self._ready.put_nowait((operation, result))
            return result
        if number < self._next or number in self._early:
            raise UserError(
                f"seq_id={number} has been used, and its result is not kept any more: go on with {self._next}"
            )
        self._early[number] = (operation, result)
        while self._next in self._early:
            self._ready.put_nowait(self._early.pop(self._next))
            self._next += 1
        return result

    def close(self) -> None:
        """Cancel what has not run."""
        self._task.cancel()
        while not self._ready.empty():
            self._ready.get_nowait()[1].cancel()
        for _, result in self._early.values():
            result.cancel()

    async def _work(self) -> None:
        while True:
            operation, result = await self._ready.get()
            await _settle(operation, result)


async def _settle(operation: Operation, result: asyncio.Future[Any]) -> None:
    """Run an operation and set its result or error."""
    try:
        value = await operation()
    except asyncio.CancelledError:
        result.cancel()
        raise
    except Exception as error:
        if not result.done():
            result.set_exception(error)
            result.exception()  # marks it as retrieved, which a client may never do
    else:
        if not result.done():
            result.set_result(value)


class Results:
    """Results by the ids of their requests."""

    def __init__(self) -> None:
        self._futures: dict[str, asyncio.Future[Any]] = {}
        self._ended: dict[str, float] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._futures

    def keep(self, request_id: str, result: asyncio.Future[Any]) -> None:
        """Keep a result that will come."""
        self._drop_old()
        self._futures[request_id] = result
        result.add_done_callback(lambda _: self._ended.setdefault(request_id, time.monotonic()))

    def start(self, request_id: str, operation: Operation) -> None:
        """Run an operation at once and keep its result."""
        result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.keep(request_id, result)
        task = asyncio.create_task(_settle(operation, result))
        self._tasks[request_id] = task
        task.add_done_callback(lambda _: self._tasks.pop(request_id, None))

    def cancel(self, request_id: str) -> None:
        """Cancel an operation that ``start`` has started, if it still runs."""
        if request_id in self._tasks:
            self._tasks[request_id].cancel()

    async def wait(self, request_id: str, seconds: float) -> asyncio.Future[Any] | None:
        """Return a result when it is there; None if it takes longer.

        Raises:
            KeyError: There is no such request.
        """
        result = self._futures[request_id]
        await asyncio.wait([result], timeout=seconds)
        return result if result.done() else None

    def _drop_old(self) -> None:
        oldest = time.monotonic() - KEPT_SECONDS
        for request_id, ended in list(self._ended.items()):
            if ended > oldest:
                break  # they are in the order of their ends
            del self._ended[request_id]
            self._futures.pop(request_id, None)
