# SPDX-License-Identifier: Apache-2.0
"""A forward pass as several CUDA graphs, with Python code between them.

What reads values on the host, or launches other kernels in each step, cannot be captured: experts, which need the
number of their tokens, and attention to cached keys without a kernel for all texts. Such functions are called through
``op_recorder.run_unrecorded``. Here each of these calls ends a graph, and the next one begins after it. A replay
launches the graphs and calls the functions again, in order.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

_CAPTURED: "ContextVar[PiecewiseGraph | None]" = ContextVar("captured_graph", default=None)


def captured_graph() -> "PiecewiseGraph | None":
    """Return the graph that is captured at the moment, if there is one."""
    return _CAPTURED.get()


class PiecewiseGraph:
    """A captured forward pass.

    Functions must return the same number of tensors of the same shapes in each call, and write into their arguments
    only in place.

    Args:
        pool: Memory that graphs of one model share.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._pieces: list[Callable[[], None]] = []
        self._open: AbstractContextManager[Any] | None = None

    @property
    def calls_python(self) -> bool:
        """Whether a replay calls functions between graphs."""
        return len(self._pieces) > 1

    def capture(self, forward: Callable[[], Tensor]) -> Tensor:
        """Capture ``forward``, and return the tensor that has its result after each replay."""
        torch.cuda.synchronize()
        token = _CAPTURED.set(self)
        try:
            self._begin_graph()
            try:
                return forward()
            finally:
                self._end_graph()
        finally:
            _CAPTURED.reset(token)

    def call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a function between two graphs, now and in each replay."""
        self._end_graph()
        self._pieces[-1]()  # what it reads has been captured, not computed
        token = _CAPTURED.set(None)  # it may call such functions itself
        try:
            result = function(*args, **kwargs)
        finally:
            _CAPTURED.reset(token)

        def call_again() -> None:
            again = function(*args, **kwargs)
            for static, value in zip(_tensors(result), _tensors(again), strict=True):
                static.copy_(value)

        self._pieces.append(call_again)
        self._begin_graph()
        return result

    def replay(self) -> None:
        """Run the pass again, on the values that its inputs have now."""
        for run_piece in self._pieces:
            run_piece()

    def _begin_graph(self) -> None:
        graph = torch.cuda.CUDAGraph()
        self._pieces.append(graph.replay)
        self._open = torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local")
        self._open.__enter__()

    def _end_graph(self) -> None:
        if self._open is not None:
            capture, self._open = self._open, None
            capture.__exit__(None, None, None)


def _tensors(result: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
