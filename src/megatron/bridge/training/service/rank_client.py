# SPDX-License-Identifier: Apache-2.0
"""The HTTP process's connection to the ranks: one thread sends commands, another receives answers."""

import asyncio
import itertools
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from megatron.bridge.inference.server.engine_client import EngineGoneError
from megatron.bridge.inference.workers import Workers
from megatron.bridge.training.service import ranks
from megatron.bridge.training.service.commands import CancelSample, Command, Event, Refused
from megatron.bridge.utils.errors import UserError


class RankClient:
    """Sends commands from an event loop.

    Args:
        workers: The ranks.
        failed: Called with the reason when they end.
    """

    def __init__(self, workers: Workers, failed: Callable[[str], object]) -> None:
        self._workers = workers
        self._failed = failed
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._outbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._failure: str | None = None
        workers.start(ranks.run)
        for target in (self._read, self._write):
            threading.Thread(target=target, daemon=True).start()

    async def call(self, kind: Callable[..., Command], *args: Any) -> Any:
        """Send a command and return its answer; a sample whose caller is cancelled is ended.

        Args:
            kind: Class of the command.
            args: Its fields after ``id``.

        Raises:
            UserError: The ranks refuse the command, which has changed nothing.
            EngineGoneError: The ranks have ended.
        """
        if self._failure is not None:
            raise EngineGoneError(self._failure)
        number = next(self._numbers)
        answer = self._answers[number] = self._loop.create_future()
        self._outbox.put(kind(number, *args))
        try:
            return await answer
        except asyncio.CancelledError:
            self._outbox.put(CancelSample(next(self._numbers), number))
            raise
        finally:
            self._answers.pop(number, None)

    def _write(self) -> None:
        while True:
            self._workers.send(self._outbox.get())

    def _read(self) -> None:
        reason = "the engine has ended"
        try:
            for events in self._workers.messages():
                if events:
                    self._call(self._dispatch, events)
        except (UserError, RuntimeError, EOFError, OSError) as error:
            reason = str(error) or type(error).__name__
        self._call(self._fail, reason)

    def _call(self, function: Callable[..., object], *args: object) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function, *args)

    def _dispatch(self, events: list[Event]) -> None:
        for event in events:
            answer = self._answers.get(event.id)
            if answer is None or answer.done():
                continue
            if isinstance(event, Refused):
                answer.set_exception(UserError(event.message))
            else:
                answer.set_result(event.value)

    def _fail(self, reason: str) -> None:
        self._failure = reason
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(EngineGoneError(reason))
        self._failed(reason)
