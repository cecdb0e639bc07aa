# SPDX-License-Identifier: Apache-2.0
"""Load and unload named adapters while an engine runs."""

from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.bridge.inference.adapter_bank import add_adapter, remove_adapter
from megatron.bridge.inference.engine import Engine
from megatron.bridge.inference.loading import attach_adapter
from megatron.bridge.utils.errors import UserError


class AdapterChanges:
    """Changes the adapters of an engine between its steps, with the same calls on all ranks.

    Texts of other adapters go on with their caches.

    Args:
        engine: The engine.
        bridge: Bridge of the base model; None for a Megatron checkpoint.
        chunks: This rank's chunks.
        most: Maximum number of adapters.
    """

    def __init__(self, engine: Engine, bridge: Any, chunks: list[Any], most: int) -> None:
        self._engine = engine
        self._names = engine.adapters
        self._bridge = bridge
        self._chunks = chunks
        self._most = most
        self._leaving: set[str] = set()

    def load(self, name: str, path: str) -> None:
        """Load the adapter in a directory.

        Raises:
            UserError: There is an adapter of this name, there are too many, or it cannot be used; nothing changes.
        """
        if name in self._names.names or name in self._leaving:
            raise UserError(
                f"adapter {name!r:.70} is loaded: unload it first, or choose another name"
            )
        if len(self._names.names) + len(self._leaving) >= self._most:
            raise UserError(f"max_adapters={self._most}: as many are loaded, so unload one first")
        attach = partial(attach_adapter, self._bridge, self._chunks)
        problem: str | None = None
        with self._engine.plain_weights():
            try:
                add_adapter(self._chunks, self._names, name, Path(path), attach)
            except UserError as error:
                problem = str(error)
            problems = _gather_problems(problem)
            if problems and problem is None:  # another rank cannot use it
                remove_adapter(self._chunks, self._names, name)
        if problems:
            raise UserError(problems[0])
        self._names.add(name)

    def close(self, name: str) -> None:
        """Accept no new texts with an adapter.

        Raises:
            UserError: There is no adapter of this name.
        """
        self._names.check(name)
        self._names.close(name)
        self._leaving.add(name)

    def remove_unused(self) -> list[str]:
        """Remove closed adapters whose last text has ended; return their names."""
        removed = sorted(name for name in self._leaving if not self._engine.uses_adapter(name))
        for name in removed:
            for lane in self._engine.lanes:
                lane.forget_adapter(name)
            with self._engine.plain_weights():
                remove_adapter(self._chunks, self._names, name)
            self._leaving.remove(name)
        return removed


def _gather_problems(problem: str | None) -> list[str]:
    """Return the problems of all ranks."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [] if problem is None else [problem]
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    return [text for text in problems if text is not None]
