# SPDX-License-Identifier: Apache-2.0
"""Repeat the PyTorch operators of a forward pass without the Python code that called them.

On a CPU, a step of few tokens spends a third of its time in the Python code of modules. Replayed operators read and
write the tensors that were there when they were recorded: inputs are tensors whose values change in place. A collective
of several ranks is called again and waited for, so all of its ranks must replay together.
"""

import operator
import sys
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode,
)
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from megatron.bridge.backends.decoding.piecewise_graph import captured_graph
from megatron.bridge.backends.kernels.c_kernels import FUNCTIONS

_WHOLE = (torch.ops.aten.linear.default, torch.ops.aten.matmul.default)
"""Operators whose parts depend on strides and on ``requires_grad``, and are others when Python sees them."""


def record(function: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Run ``function``, and return a function that runs the same operators.

    ``function`` must call the same operators each time, and must not read values of tensors in Python.
    """
    with _Recorder() as recorder:
        result = function()
    return recorder.replay(result)


def run_unrecorded(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function``; a recording or a CUDA graph has one call of it, whose Python code runs again in each replay.

    It may read values of tensors. It returns a tensor, or several with or without ``None`` among them, and writes into
    its arguments only in place.
    """
    graph = captured_graph()
    if graph is not None:
        return graph.call(function, args, kwargs)
    mode = _get_current_dispatch_mode()
    if not isinstance(mode, _Recorder):
        return function(*args, **kwargs)
    with _disable_current_modes():
        result = function(*args, **kwargs)

    def call(*args: Any, **kwargs: Any) -> Any:  # fx needs a name
        return function(*args, **kwargs)

    mode.add_call(call, args, kwargs, result)
    return result


class _Recorder(TorchDispatchMode):
    """Writes each operator that runs in the context as a node of a graph."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether the first operator imports torch's compiler (0.8 s), to exclude this class from it."""
        return "torch._dynamo" in sys.modules

    def __init__(self) -> None:
        super().__init__()
        self._graph = fx.Graph()
        self._nodes: MutableMapping[Tensor, fx.Node] = (
            WeakIdKeyDictionary()
        )  # memory of results is freed as always
        self._constants: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, (
            "the value of a tensor is read in Python"
        )
        kwargs = kwargs or {}
        with self:
            result = NotImplemented if func in _WHOLE else func.decompose(*args, **kwargs)
        if result is not NotImplemented:  # it consists of other operators, which have been recorded
            return result
        result = func(*args, **kwargs)
        if func.namespace == "c10d":  # its results are among its arguments
            self._graph.call_function(_run_collective, tree_map(self._node, (func, args, kwargs)))
            return result
        if (
            args and result is args[0] and not func._schema.is_mutable
        ):  # such as a cast to the same dtype
            return result
        self.add_call(FUNCTIONS.get(func, func), args, kwargs, result)
        return result

    def add_call(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Write a call that has returned ``result`` as a node."""
        node = self._graph.call_function(function, *tree_map(self._node, (args, kwargs)))
        if isinstance(result, Tensor):
            self._nodes.setdefault(result, node)  # an operator in place returns its argument
            return
        for index, part in enumerate(result or ()):
            if part is not None:
                self._nodes[part] = self._graph.call_function(operator.getitem, (node, index))

    def _node(self, value: Any) -> Any:
        """Return the node that computes a tensor, or an input of the graph for a tensor from before."""
        if isinstance(value, torch.ScriptObject):  # such as a process group
            self._constants.append(value)
            return self._graph.placeholder(f"constant{len(self._constants)}")
        if not isinstance(value, Tensor):
            return value
        if value not in self._nodes:
            self._constants.append(value)
            self._nodes[value] = self._graph.placeholder(f"constant{len(self._constants)}")
        return self._nodes[value]

    def replay(self, result: Tensor) -> Callable[[], Tensor]:
        self._graph.output(self._node(result))
        code = self._graph.python_code("self")
        constants = self._constants
        functions: dict[str, Any] = dict(code.globals)
        exec(code.src, functions)  # a GraphModule would also keep the graph: 2 MB for 30 layers
        return lambda: functions["forward"](None, *constants)


def _run_collective(func: Any, args: Any, kwargs: Any) -> None:
    for leaf in tree_leaves(func(*args, **kwargs)):
        if isinstance(leaf, torch.ScriptObject):  # what the callers of Python's functions wait for
            work: Any = leaf
            work.wait()
