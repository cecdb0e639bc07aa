# SPDX-License-Identifier: Apache-2.0
"""The receiving side: steps in, weights replaced, always between the beginning and the end."""

from contextlib import ExitStack
from typing import Any, Protocol

import torch

from megatron.bridge.inference.engine import Engine
from megatron.bridge.inference.refit import packing
from megatron.bridge.inference.refit.native import NativeReceiver
from megatron.bridge.inference.refit.shared_buffer import attached
from megatron.bridge.inference.refit.steps import Begin, Bucket, Finish, WeightStep
from megatron.bridge.models.conversion.auto_bridge import AutoBridge
from megatron.bridge.utils.errors import UserError


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
