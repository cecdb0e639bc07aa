# SPDX-License-Identifier: Apache-2.0
"""Processes that ``LLM`` starts for a plain script, one per rank."""

import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from functools import partial
from multiprocessing import connection, get_context
from typing import Any

from megatron.bridge.utils.errors import UserError
from megatron.bridge.utils.processes import die_with_parent, free_port

BEAT_SECONDS = 2.0  # heartbeat interval of a rank in a conversation
SILENT_SECONDS = 25.0  # a rank without a heartbeat for this long is considered hung


class Workers(AbstractContextManager["Workers"]):
    """Processes that each call ``make(path, **options)``, usually ``LLM``, for one rank of a model."""

    def __init__(
        self, size: int, make: Callable[..., Any], path: str, options: dict[str, Any]
    ) -> None:
        context = get_context("spawn")
        port = free_port()
        self._pipes: list[Any] = []
        self._processes: list[Any] = []
        for rank in range(size):
            parent_end, child_end = context.Pipe()
            process = context.Process(
                target=_serve_rank,
                args=(rank, size, port, partial(make, path, **options), child_end),
                daemon=True,
            )
            process.start()
            child_end.close()
            self._pipes.append(parent_end)
            self._processes.append(process)
        try:
            self._answers()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *error: Any) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()

    def iterate(
        self, method: str, args: tuple[Any, ...], stopped: Callable[[], bool] | None = None
    ) -> Iterator[Any]:
        """Yield the results of a method of ``LLM`` on rank 0; ``stopped`` returns whether to end early."""
        for rank in range(len(self._pipes)):
            self._send(rank, (method, args, stopped is not None))
        kind, value = self._receive(0)
        while kind == "piece":
            if stopped is not None and stopped():
                self._send(0, "stop")
            try:
                yield value
            except GeneratorExit:
                self._drain()
                raise
            kind, value = self._receive(0)
        self._answers(first=(kind, value))

    def start(self, function: Callable[..., Iterator[Any]], *args: Any) -> None:
        """Start a conversation on all ranks: each calls the module-level ``function(llm, receive, *args)``.

        On rank 0, ``receive(seconds)`` returns the messages of ``send``, and waits up to that long for the first one;
        on other ranks it returns no messages. ``messages`` yields the values that rank 0 yields.
        """
        for rank in range(len(self._pipes)):
            self._send(rank, (function, args, False))

    def send(self, message: Any) -> None:
        """Send a message to rank 0; this blocks while its pipe is full."""
        self._send(0, message)

    def messages(self, silence: float = SILENT_SECONDS) -> Iterator[Any]:
        """Yield the values of rank 0 in a conversation until all ranks are done.

        Raises:
            UserError: a rank has ended, or has sent nothing for ``silence`` seconds.
            RuntimeError: a rank failed; the message has its traceback.
        """
        heard = dict.fromkeys(range(len(self._pipes)), time.monotonic())
        while heard:
            ready = connection.wait(
                [*self._pipes, *(process.sentinel for process in self._processes)], timeout=1.0
            )
            for rank in [rank for rank in heard if self._pipes[rank] in ready]:
                kind, value = self._next(rank)
                heard[rank] = time.monotonic()
                if kind == "piece":
                    yield value
                elif kind == "done":
                    del heard[rank]
                elif kind != "beat":
                    raise RuntimeError(value)
            self._refuse_silent(heard, silence)

    def _next(self, rank: int) -> tuple[str, Any]:
        try:
            return self._pipes[rank].recv()
        except (EOFError, OSError):
            self._processes[rank].join(timeout=1.0)
            self._refuse_ended()
            raise

    def _refuse_silent(self, heard: dict[int, float], silence: float) -> None:
        for rank, last in heard.items():
            if time.monotonic() - last > silence:
                self.__exit__()
                raise UserError(
                    f"rank {rank} of {len(self._processes)} has not responded for {silence:.0f} s: start again"
                )

    def _drain(self) -> None:
        """End an iteration that the caller has abandoned."""
        self._send(0, "stop")
        kind, value = self._receive(0)
        while kind == "piece":
            kind, value = self._receive(0)
        self._answers(first=(kind, value))

    def _answers(self, first: tuple[str, Any] | None = None) -> Any:
        answers = [
            first or self._receive(0),
            *(self._receive(rank) for rank in range(1, len(self._pipes))),
        ]
        for kind, value in answers:
            if kind == "refused":
                raise UserError(value)
            if kind == "failed":
                raise RuntimeError(value)
        return answers[0][1]

    def _send(self, rank: int, message: Any) -> None:
        with suppress(OSError):  # the rank has ended, and ``_receive`` reports it
            self._pipes[rank].send(message)

    def _receive(self, rank: int) -> tuple[str, Any]:
        """Return the next answer of a rank; raise as soon as any process ends."""
        pipe = self._pipes[rank]
        while True:
            ready = connection.wait([pipe, *(process.sentinel for process in self._processes)])
            if pipe in ready:
                try:
                    return pipe.recv()
                except (
                    EOFError,
                    OSError,
                ):  # the connection is reset if the rank left messages unread
                    pass
            self._refuse_ended()

    def _refuse_ended(self) -> None:
        for rank, process in enumerate(self._processes):
            if process.exitcode is not None:
                self.__exit__()
                raise UserError(
                    f"rank {rank} of {len(self._processes)} ended with exit code {process.exitcode}: start "
                    "again, with less kv_memory if the machine ran out of memory"
                )


def _serve_rank(rank: int, size: int, port: int, make: Callable[[], Any], pipe: Any) -> None:
    die_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the script handles Ctrl-C
    environment = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    os.environ |= {name: str(value) for name, value in environment.items()}
    llm: Any = None

    def load() -> None:
        nonlocal llm
        llm = make()

    _answer_call(pipe, load)
    while llm is not None:
        try:
            request = pipe.recv()
        except (EOFError, OSError):  # the connection is reset if the script left answers unread
            return
        if request != "stop":  # ignore a late stop
            _answer_call(pipe, partial(_send_pieces, llm, pipe, rank, *request))


def _answer_call(pipe: Any, function: Callable[[], Any]) -> None:
    try:
        pipe.send(("done", function()))
    except UserError as error:
        pipe.send(("refused", str(error)))
    except Exception:  # the script raises it
        pipe.send(("failed", traceback.format_exc()))


def _send_pieces(
    llm: Any, pipe: Any, rank: int, method: Any, args: tuple[Any, ...], may_stop: bool
) -> None:
    """Send the values that the method or function yields on rank 0."""
    if callable(method):
        _converse_with_parent(llm, pipe, rank, method, args)
        return

    def stopped() -> bool:
        return rank == 0 and pipe.poll() and pipe.recv() == "stop"

    pieces = getattr(llm, method)(*args, stopped) if may_stop else getattr(llm, method)(*args)
    for piece in pieces:
        if rank == 0:
            pipe.send(("piece", piece))


def _converse_with_parent(
    llm: Any, pipe: Any, rank: int, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    lock = threading.Lock()
    over = threading.Event()

    def send(kind: str, value: Any = None) -> None:
        with lock:
            pipe.send((kind, value))

    def receive(seconds: float) -> list[Any]:
        messages: list[Any] = []
        while rank == 0 and pipe.poll(0 if messages else seconds):
            messages.append(pipe.recv())
        return messages

    def beat() -> None:
        while not over.wait(BEAT_SECONDS):
            with suppress(OSError):
                send("beat")

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        for piece in function(llm, receive, *args):
            if rank == 0:
                send("piece", piece)
    finally:
        over.set()
        thread.join()
