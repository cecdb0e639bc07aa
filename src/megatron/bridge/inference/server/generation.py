# SPDX-License-Identifier: Apache-2.0
"""Process one completion request, from its prompts to its response objects."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from megatron.bridge.inference.server.answers import Choice, Json, usage
from megatron.bridge.inference.server.engine_client import (
    EngineClient,
    QueueFullError,
    RequestStream,
)
from megatron.bridge.inference.server.engine_loop import ChoiceProgress
from megatron.bridge.inference.server.errors import ApiError, check_finish_reason
from megatron.bridge.inference.server.metrics import Metrics
from megatron.bridge.inference.server.planner import RequestPlan

RETRY_SECONDS = 1


@dataclass
class Generation:
    """The completions of one or several prompts in one response."""

    client: EngineClient  # computes the completions
    metrics: Metrics  # counts requests and tokens
    plan: RequestPlan  # what is computed
    seconds: float  # time limit of the request
    include_usage: bool = False
    _streams: list[RequestStream] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._choices = self.plan.make_choices()

    async def start(self) -> None:
        """Submit the prompts to the engine, and wait until it has accepted all of them.

        Raises:
            ApiError: the queue is full.
            UserError: the engine refuses a prompt.
            EngineGoneError: the engine has ended.
        """
        self._end = asyncio.get_running_loop().time() + self.seconds
        try:
            for prompt in self.plan.prompts:
                self._streams.append(self.client.submit(prompt, self.plan.sampling))
            async with self._deadline():
                for stream in self._streams:
                    await stream.accepted()
        except QueueFullError as error:
            self.close()
            headers = {"Retry-After": str(RETRY_SECONDS)}
            raise ApiError(
                429, "too many requests are waiting: try again later", headers=headers
            ) from error
        except BaseException:
            self.close()
            raise
        self._times = self.metrics.watch(sum(map(len, self.plan.prompts)))

    @asynccontextmanager
    async def _deadline(self) -> AsyncIterator[None]:
        """Apply the request's time limit; a timeout raises an error response."""
        try:
            async with asyncio.timeout_at(self._end):
                yield
        except TimeoutError as error:
            message = (
                f"the request exceeded {self.seconds:.0f} s: request fewer tokens, or try again"
            )
            raise ApiError(504, message, code="timeout") from error

    async def _progress(self) -> AsyncGenerator[tuple[Choice, ChoiceProgress]]:
        """Yield the steps of all choices as they are computed."""
        merged: asyncio.Queue[Any] = asyncio.Queue()
        tasks = [
            asyncio.create_task(_pour_events(index, stream, merged))
            for index, stream in enumerate(self._streams)
        ]
        try:
            left = len(tasks)
            while left:
                async with self._deadline():
                    prompt_index, event = await merged.get()
                if isinstance(event, Exception):
                    raise event
                if event is None:
                    left -= 1
                    continue
                yield self._noted(prompt_index, event), event
            self._times.over()
        finally:
            for task in tasks:
                task.cancel()

    def _noted(self, prompt_index: int, progress: ChoiceProgress) -> Choice:
        choice = self._choices[prompt_index * self.plan.sampling.n + progress.choice]
        choice.add(progress)
        if progress.tokens:
            self._times.tokens(choice.index, len(progress.tokens))
        if progress.finish_reason is not None:
            self.metrics.ended(progress.finish_reason)
        check_finish_reason(progress.finish_reason)
        return choice

    async def whole(self) -> Json:
        async for _ in self._progress():
            pass
        return self.plan.write_answer(self._choices)

    async def pieces(self) -> AsyncGenerator[Json]:
        """Yield the response as a stream of chunks."""
        begun: set[int] = set()
        form = self.plan.format
        async with aclosing(self._progress()) as steps:
            async for choice, progress in steps:
                if choice.index not in begun:
                    begun.add(choice.index)
                    for first in form.first_pieces(choice):
                        yield self._chunk([first])
                piece = form.piece(choice, progress)
                if piece is not None:
                    yield self._chunk([piece])
        if self.include_usage:
            yield {**self._chunk([]), "usage": usage(self.plan.prompts, self._choices)}

    def _chunk(self, choices: list[Json]) -> Json:
        return {**self.plan.head, "object": self.plan.format.chunk_kind, "choices": choices}

    def close(self) -> None:
        for stream in self._streams:
            stream.close()


async def _pour_events(
    prompt_index: int, stream: RequestStream, merged: "asyncio.Queue[Any]"
) -> None:
    """Put the events of one prompt into the shared queue, then None or the error."""
    try:
        async for progress in stream.progress():
            merged.put_nowait((prompt_index, progress))
        merged.put_nowait((prompt_index, None))
    except Exception as error:  # the reader of the queue raises it
        merged.put_nowait((prompt_index, error))
