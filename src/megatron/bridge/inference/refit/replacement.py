# SPDX-License-Identifier: Apache-2.0
"""The receiving side: steps in, weights replaced, always between the beginning and the end.

A sender says ``Begin``, a ``Bucket`` for each, ``Finish``; to a process of its own over a
``multiprocessing.connection.Connection``.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from megatron.bridge.inference.engine import Engine
from megatron.bridge.inference.refit import packing
from megatron.bridge.inference.refit.native import NativeReceiver
from megatron.bridge.inference.refit.shared_buffer import attached
from megatron.bridge.models.conversion.auto_bridge import AutoBridge
from megatron.bridge.utils.errors import UserError


@dataclass(frozen=True)
class Begin:
    """New weights are coming."""

    infos: list[Any]  # ``WeightInfo`` of each tensor, in order
    bucket_bytes: int  # as ``packing.layout`` takes it, so that both sides know what a bucket holds
    path: Path  # of the shared buffer
    size: int  # of the shared buffer
    partial: bool  # only tensors that changed are coming
    running: Any = "abort"  # what becomes of texts that run, as ``Engine.new_weights`` takes it


@dataclass(frozen=True)
class Bucket:
    """The buffer holds the tensors of bucket ``index``; their place may be filled again after the answer."""

    index: int


@dataclass(frozen=True)
class Finish:
    """Everything has come."""


WeightStep = Begin | Bucket | Finish


class Receiver(Protocol):
    """What takes tensors: ``NativeReceiver``, ``TransformersReceiver``, or your own."""

    def begin(self, infos: Any, partial: bool = False) -> None: ...
    def receive(self, name: str, weight: Any) -> None: ...
    def finish(self) -> None: ...


class BucketReader:
    """Hands the tensors of each bucket to a receiver."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._buckets: list[list[packing.Slot]] | None = None
        self._next = 0
        self._buffer = torch.empty(0)

    def take(self, step: WeightStep) -> None:
        if isinstance(step, Begin):
            self._receiver.begin(step.infos, step.partial)
            self._buckets, self._next = packing.layout(step.infos, step.bucket_bytes), 0
            self._buffer = attached(step.path, step.size)
            return
        if self._buckets is None or (isinstance(step, Bucket) and step.index != self._next):
            raise UserError(f"weights came out of order ({step}): begin again")
        if isinstance(step, Finish):
            self._receiver.finish()
            self._buckets, self._buffer = None, torch.empty(0)
            return
        for name, weight in packing.views(self._buffer, self._buckets[step.index]):
            self._receiver.receive(name, weight)
        self._next += 1


class Replacement:
    """Steps for an engine of this project."""

    def __init__(self, engine: Engine, bridge: AutoBridge, chunks: list[Any]) -> None:
        self._engine = engine
        self._open = ExitStack()
        with engine.plain_weights():
            self._reader = BucketReader(NativeReceiver(bridge, chunks))

    def take(self, step: WeightStep) -> None:
        """Do one step; the engine has its new weights after ``Finish``."""
        if isinstance(step, Begin):
            self._open.close()  # of a sender that has given up
            self._reader.take(step)
            self._open.enter_context(self._engine.new_weights(step.running))
            return
        self._reader.take(step)
        if isinstance(step, Finish):
            self._open.close()


class RemoteReceiver:
    """``take`` of ``send_weights`` for the process at the other end, which calls ``receive_weights``."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def __call__(self, step: WeightStep) -> None:
        """Hand a step over and wait until it is done."""
        try:
            self._connection.send(step)
            problem = self._connection.recv()
        except (EOFError, OSError) as error:
            raise UserError("the process that receives weights has ended: start it again from an export") from error
        if problem is not None:
            raise UserError(problem)


def receive_weights(connection: Any, reader: BucketReader) -> None:
    """Take all steps of one refit from the process at the other end, which is told of an error, too."""
    step = None
    while not isinstance(step, Finish):
        step = connection.recv()
        try:
            reader.take(step)
        except UserError as error:
            connection.send(str(error))
            raise
        connection.send(None)
