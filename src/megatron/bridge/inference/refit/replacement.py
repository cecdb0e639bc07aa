# SPDX-License-Identifier: Apache-2.0
"""The receiving side of a weight update, which replaces weights between two steps of the engine.

A sender sends ``Begin``, a ``Bucket`` for each bucket, and ``Finish``. Another process receives them over a
``multiprocessing.connection.Connection``.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron.bridge.inference.engine import Engine
from megatron.bridge.inference.refit import packing
from megatron.bridge.inference.refit.packing import attached
from megatron.bridge.inference.refit.stream import WeightInfo
from megatron.bridge.models.conversion.auto_bridge import AutoBridge
from megatron.bridge.models.conversion.engine import load
from megatron.bridge.models.conversion.engine.plan import WeightConversionTask
from megatron.bridge.models.conversion.model_bridge import bridge_for
from megatron.bridge.utils.errors import UserError, first_few


class _Arrived(dict[str, Tensor]):
    """Received tensors with the interface of a checkpoint for ``load.fill``."""

    def copy(self, name: str, index: tuple[int | slice, ...], target: Tensor) -> None:
        tensor = self[name]
        target.copy_(tensor[index] if tensor.ndim else tensor)

    def release(self, name: str, row: int | None = None) -> None:
        """Do nothing: ``_forget`` drops tensors that no task needs."""


class NativeReceiver:
    """Load tensors into the parameters of a model."""

    def __init__(self, bridge: AutoBridge, model: Any) -> None:
        plan = bridge.plan(model)
        self._hook = bridge_for(bridge.hf_config)
        self._ties = plan.ties
        self._left_out = set(plan.buffers)
        self._names = set(plan.hf_names)
        self._tasks = [task for task in plan.tasks if task.param_weight is not None]
        self._users: dict[str, list[WeightConversionTask]] = {}
        for task in self._tasks:
            for name in task.mapping.hf_names:
                self._users.setdefault(name, []).append(task)

    def begin(self, infos: Sequence[WeightInfo], partial: bool = False) -> None:
        """Prepare for tensors; with ``partial``, only changed tensors arrive, and the rest keep their values."""
        names = {info.name for info in infos}
        missing = [] if partial else sorted(self._names - names)
        surplus = sorted(names - self._names - self._left_out - set(self._ties))
        if missing or surplus:
            difference = (
                f"lack {first_few(missing)}"
                if missing
                else f"have {first_few(surplus)} in addition"
            )
            raise UserError(
                f"the weights of the trainer {difference}: load the model that is trained into the engine"
            )
        self._arrived = _Arrived()
        self._left = {id(task): set(task.mapping.hf_names) & names for task in self._tasks}
        self._waiting = {name: len(self._users.get(name, ())) for name in names}

    def receive(self, name: str, weight: Tensor) -> None:
        """Take a tensor, which the caller may overwrite after the call."""
        users = self._users.get(name, [])
        if not users:
            return
        needed = any(self._left[id(task)] != {name} for task in users)
        self._arrived[name] = weight.clone() if needed else weight
        for task in users:
            left = self._left[id(task)]
            left.discard(name)
            if not left:
                load.fill(self._hook, task, self._arrived)  # type: ignore[arg-type]
                self._forget(task)

    def _forget(self, task: WeightConversionTask) -> None:
        for name in task.mapping.hf_names:
            self._waiting[name] -= 1
            if not self._waiting[name]:
                self._arrived.pop(name, None)

    def finish(self) -> None:
        missing = sorted({name for names in self._left.values() for name in names})
        if missing:
            raise UserError(
                f"the weights ended before {first_few(missing)}: send all tensors of begin()"
            )


@dataclass(frozen=True)
class Begin:
    """Announces new weights."""

    infos: list[Any]  # ``WeightInfo`` of each tensor, in order
    bucket_bytes: int  # argument of ``packing.layout``, with which both sides compute the contents of a bucket
    path: Path  # path of the shared buffer
    size: int  # size of the shared buffer
    partial: bool  # only changed tensors arrive
    running: Any = "abort"  # what to do with running texts, as in ``Engine.new_weights``


@dataclass(frozen=True)
class Bucket:
    """Bucket ``index`` is in the buffer, which may be overwritten after the response."""

    index: int


@dataclass(frozen=True)
class Finish:
    """All tensors were sent."""


WeightStep = Begin | Bucket | Finish


class Receiver(Protocol):
    """Interface of receivers: ``NativeReceiver``, ``TransformersReceiver``, or your own class."""

    def begin(self, infos: Any, partial: bool = False) -> None: ...
    def receive(self, name: str, weight: Any) -> None: ...
    def finish(self) -> None: ...


class BucketReader:
    """Pass the tensors of each bucket to a receiver."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._buckets: list[list[packing.BucketSlot]] | None = None
        self._next = 0
        self._buffer = torch.empty(0)

    def take(self, step: WeightStep) -> None:
        if isinstance(step, Begin):
            self._receiver.begin(step.infos, step.partial)
            self._buckets = packing.layout(step.infos, step.bucket_bytes)
            self._next = 0
            self._buffer = attached(step.path, step.size)
            return
        if self._buckets is None or (isinstance(step, Bucket) and step.index != self._next):
            raise UserError(f"weights arrived out of order ({step}): restart the update")
        if isinstance(step, Finish):
            self._receiver.finish()
            self._buckets = None
            self._buffer = torch.empty(0)
            return
        for name, weight in packing.views(self._buffer, self._buckets[step.index]):
            self._receiver.receive(name, weight)
        self._next += 1


class Replacement:
    """Apply the steps to an engine of this project."""

    def __init__(self, engine: Engine, bridge: AutoBridge, chunks: list[Any]) -> None:
        self._engine = engine
        self._open = ExitStack()
        with engine.plain_weights():
            self._reader = BucketReader(NativeReceiver(bridge, chunks))

    def take(self, step: WeightStep) -> None:
        """Apply one step; after ``Finish``, the engine uses the new weights."""
        if isinstance(step, Begin):
            self._open.close()  # the sender of the previous update has stopped
            self._reader.take(step)
            self._open.enter_context(self._engine.new_weights(step.running))
            return
        self._reader.take(step)
        if isinstance(step, Finish):
            self._open.close()


class RemoteReceiver:
    """Pass the steps of ``send_weights`` to another process, which calls ``receive_weights``."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def __call__(self, step: WeightStep) -> None:
        """Send a step and wait until it is done."""
        try:
            self._connection.send(step)
            problem = self._connection.recv()
        except (EOFError, OSError) as error:
            raise UserError(
                "the process that receives weights has ended: restart it from an export"
            ) from error
        if problem is not None:
            raise UserError(problem)


def receive_weights(connection: Any, reader: BucketReader) -> None:
    """Take all steps of an update from another process, and report errors to it."""
    step = None
    while not isinstance(step, Finish):
        step = connection.recv()
        try:
            reader.take(step)
        except UserError as error:
            connection.send(str(error))
            raise
        connection.send(None)
