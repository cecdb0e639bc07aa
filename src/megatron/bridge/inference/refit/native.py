# SPDX-License-Identifier: Apache-2.0
"""Weights that arrive, into a Megatron model of any layout: each rank takes its parts of the tensors."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from megatron.bridge.inference.refit.stream import WeightInfo
from megatron.bridge.models.conversion.auto_bridge import AutoBridge
from megatron.bridge.models.conversion.engine import load
from megatron.bridge.models.conversion.engine.plan import WeightConversionTask
from megatron.bridge.models.conversion.model_bridge import bridge_for
from megatron.bridge.utils.errors import UserError, first_few


class _Arrived(dict[str, Tensor]):
    """Tensors that have arrived, as ``load.fill`` reads a checkpoint."""

    def copy(self, name: str, index: tuple[int | slice, ...], target: Tensor) -> None:
        tensor = self[name]
        target.copy_(tensor[index] if tensor.ndim else tensor)

    def release(self, name: str, row: int | None = None) -> None:
        """Tensors go when no task needs them any more."""


class NativeReceiver:
    """Fills the parameters of a model."""

    def __init__(self, bridge: AutoBridge, model: Any) -> None:
        plan = bridge.plan(model)
        self._hook = bridge_for(bridge.hf_config)
        self._ties, self._left_out = plan.ties, set(plan.buffers)
        self._names = set(plan.hf_names)
        self._tasks = [task for task in plan.tasks if task.param_weight is not None]
        self._users: dict[str, list[WeightConversionTask]] = {}
        for task in self._tasks:
            for name in task.mapping.hf_names:
                self._users.setdefault(name, []).append(task)

    def begin(self, infos: Sequence[WeightInfo], partial: bool = False) -> None:
        """Prepare for tensors; with ``partial`` only what changed comes, and the rest stays as it is."""
        names = {info.name for info in infos}
        missing = [] if partial else sorted(self._names - names)
        surplus = sorted(names - self._names - self._left_out - set(self._ties))
        if missing or surplus:
            what = f"lack {first_few(missing)}" if missing else f"hold {first_few(surplus)} besides"
            raise UserError(f"the weights of the trainer {what}: generate with the model that is trained")
        self._arrived = _Arrived()
        self._left = {id(task): set(task.mapping.hf_names) & names for task in self._tasks}
        self._waiting = {name: len(self._users.get(name, ())) for name in names}

    def receive(self, name: str, weight: Tensor) -> None:
        """Take a tensor, which may be overwritten after the call."""
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
            raise UserError(f"the weights ended before {first_few(missing)}: send all that was announced")
