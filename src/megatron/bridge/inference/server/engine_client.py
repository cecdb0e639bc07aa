# SPDX-License-Identifier: Apache-2.0
"""The server's connection to the engine: one thread sends requests to the ranks, another receives events."""

import asyncio
import itertools
import queue
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

from megatron.bridge.inference.requests import Sampling
from megatron.bridge.inference.server import engine_loop
from megatron.bridge.inference.server.engine_loop import (
    Cancel,
    ChoiceProgress,
    Command,
    Event,
    Load,
    LoadAdapter,
    RefusedRequest,
    Submit,
    UnloadAdapter,
)
from megatron.bridge.inference.workers import Workers
from megatron.bridge.utils.errors import UserError


class QueueFullError(Exception):
    """The number of waiting choices exceeds the limit of the server."""


class EngineGoneError(Exception):
    """The engine has ended; the message has the reason."""


class EngineClient:
    """Communicate with the ranks of ``workers`` from an event loop; call ``failed`` with the reason when they end."""

    def __init__(self, workers: Workers, capacity: int, failed: Callable[[str], object]) -> None:
        self._workers = workers
        self._capacity = capacity
        self._failed = failed
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count()
        self._streams: dict[int, RequestStream] = {}
        self._outbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self.load = Load()
        self.failure: str | None = None
        workers.start(engine_loop.run)
        for target in (self._read, self._write):
            threading.Thread(target=target, daemon=True).start()

    @property
    def outstanding(self) -> int:
        """Number of running and waiting choices."""
        return sum(stream.open_choices for stream in self._streams.values())

    def submit(self, prompt: list[int], sampling: Sampling) -> "RequestStream":
        """Submit a prompt to the engine.

        Raises:
            QueueFullError: too many choices are waiting.
            EngineGoneError: the engine has ended.
        """
        if self.failure is not None:
            raise EngineGoneError(self.failure)
        if self.outstanding + sampling.n > self._capacity:
            raise QueueFullError
        stream = RequestStream(self, next(self._numbers), sampling.n)
        self._streams[stream.id] = stream
        self._outbox.put(Submit(stream.id, prompt, sampling))
        return stream

    async def load_adapter(self, name: str, path: str) -> None:
        """Load an adapter on all ranks.

        Raises:
            UserError: The adapter cannot be used.
            EngineGoneError: The engine has ended.
        """
        await self._change(lambda number: LoadAdapter(number, name, path))

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter when its last text has ended; no new text can use it meanwhile."""
        await self._change(lambda number: UnloadAdapter(number, name))

    async def _change(self, make_command: Callable[[int], Command]) -> None:
        if self.failure is not None:
            raise EngineGoneError(self.failure)
        stream = RequestStream(self, next(self._numbers), 0)
        self._streams[stream.id] = stream
        self._outbox.put(make_command(stream.id))
        try:
            await stream.accepted()
        finally:
            stream.close()

    def forget(self, stream: "RequestStream") -> None:
        """Drop a request, so that the engine stops computing it."""
        if self._streams.pop(stream.id, None) is not None and stream.open_choices:
            self._outbox.put(Cancel(stream.id))

    def _write(self) -> None:
        while True:
            self._workers.send(self._outbox.get())

    def _read(self) -> None:
        reason = "the engine has ended"
        try:
            for events, load in self._workers.messages():
                self._call(self._dispatch, events, load)
        except (UserError, RuntimeError, EOFError, OSError) as error:
            reason = str(error) or type(error).__name__
        self._call(self._fail, reason)

    def _call(self, function: Callable[..., object], *args: object) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function, *args)

    def _dispatch(self, events: list[Event], load: Load) -> None:
        self.load = load
        for event in events:
            stream = self._streams.get(event.id)
            if stream is not None:
                stream.put(event)

    def _fail(self, reason: str) -> None:
        self.failure = reason
        for stream in self._streams.values():
            stream.put(EngineGoneError(reason))
        self._failed(reason)


class RequestStream:
    """The events of one request, in order.

    Attributes:
        id: number of the request.
        open_choices: number of choices that have not ended.
    """

    def __init__(self, client: EngineClient, request_id: int, choices: int) -> None:
        self.id = request_id
        self.open_choices = choices
        self._client = client
        self._events: asyncio.Queue[Event | EngineGoneError] = asyncio.Queue()

    def put(self, event: Event | EngineGoneError) -> None:
        if isinstance(event, RefusedRequest):
            self.open_choices = 0
        elif isinstance(event, ChoiceProgress) and event.finish_reason is not None:
            self.open_choices -= 1
        self._events.put_nowait(event)

    async def accepted(self) -> None:
        """Wait until the engine has accepted the request.

        Raises:
            UserError: the engine refuses the request.
            EngineGoneError: the engine has ended.
        """
        event = await self._next()
        if isinstance(event, RefusedRequest):
            raise UserError(event.message)

    async def progress(self) -> AsyncIterator[ChoiceProgress]:
        """Yield the steps of an accepted request until all choices are over; may raise ``EngineGoneError``."""
        while self.open_choices or not self._events.empty():
            event = await self._next()
            assert isinstance(event, ChoiceProgress)
            yield event

    async def _next(self) -> Event:
        event = await self._events.get()
        if isinstance(event, EngineGoneError):
            raise event
        return event

    def close(self) -> None:
        self._client.forget(self)
