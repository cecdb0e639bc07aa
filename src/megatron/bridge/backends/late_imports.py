# SPDX-License-Identifier: Apache-2.0
"""Keep what is slow to import out of the imports of Megatron-Core and transformers until it is used.

Importing Megatron-Core imports sympy (0.5 s of CPU time, through torch's DTensor) and TensorBoard (0.2 s), and
importing configs and tokenizers of transformers imports torch's compiler (0.8 s). Most processes call nothing of them.
``backends.cpu.import_hook`` calls the functions of this module around these imports.
"""

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from megatron.bridge.utils.patching import patched

type Execute = Callable[[ModuleType], None]
"""Runs the code of a module that is being imported."""

_TRACKERS = ("torch.utils.tensorboard", "wandb")
_SYMBOLIC_SHAPES = "torch.fx.experimental.symbolic_shapes"
_DEFERRED_FUNCTION = "statically_known_true"


def load_timers(module: ModuleType, execute: Execute) -> None:
    """Import ``megatron.core.timers``, and the trackers only when ``Timers.write`` is first called."""
    with _hide_modules(_TRACKERS) as hidden:
        execute(module)
    timers: Any = module
    write = timers.Timers.write

    @functools.wraps(write)
    def write_to_tracker(*args: Any, **kwargs: Any) -> None:
        timers.Timers.write = write
        if "torch.utils.tensorboard" in hidden:
            timers.SummaryWriter = getattr(
                _import("torch.utils.tensorboard"), "SummaryWriter", None
            )
        if "wandb" in hidden:
            timers.wandb = _import("wandb")
        write(*args, **kwargs)

    timers.Timers.write = write_to_tracker


@contextmanager
def _hide_modules(names: tuple[str, ...]) -> Iterator[list[str]]:
    """Make imports of modules fail inside the context, unless they are imported; yield their names."""
    hidden = [name for name in names if name not in sys.modules]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield hidden
    finally:
        for name in hidden:
            del sys.modules[name]


def _import(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def load_tensor_ops(module: ModuleType, execute: Execute) -> None:
    """Import DTensor's ``_tensor_ops``, and sympy only when it first compares symbolic shapes."""
    if _SYMBOLIC_SHAPES in sys.modules:
        execute(module)
        return
    stand_in = _SymbolicShapes(module)
    sys.modules[_SYMBOLIC_SHAPES] = stand_in
    try:
        execute(module)
    finally:
        if sys.modules.get(_SYMBOLIC_SHAPES) is stand_in:
            del sys.modules[_SYMBOLIC_SHAPES]


class _SymbolicShapes(ModuleType):
    """Stands for torch's module, which imports sympy, while ``user`` is imported."""

    def __init__(self, user: ModuleType) -> None:
        super().__init__(_SYMBOLIC_SHAPES)
        self._user = user

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name != _DEFERRED_FUNCTION:  # another version of torch
            return getattr(self._import_real(), name)

        def call_real(*args: Any) -> Any:
            function = getattr(self._import_real(), name)
            setattr(self._user, name, function)
            return function(*args)

        return call_real

    def _import_real(self) -> ModuleType:
        if sys.modules.get(_SYMBOLIC_SHAPES) is self:
            del sys.modules[_SYMBOLIC_SHAPES]
        return importlib.import_module(_SYMBOLIC_SHAPES)


def load_paged_cache(module: ModuleType, execute: Execute) -> None:
    """Import transformers' paged cache; its decorator ``torch.compiler.disable`` imports the compiler."""
    if "torch._dynamo" in sys.modules:
        execute(module)
        return
    import torch

    with patched(torch.compiler, disable=_disable_later):
        execute(module)


def _disable_later(function: Callable[..., Any]) -> Callable[..., Any]:
    """Exclude a function from compilation once there is a compiler."""
    import torch

    disabled: Callable[..., Any] | None = None

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal disabled
        if disabled is None:
            if "torch._dynamo" not in sys.modules:
                return function(*args, **kwargs)
            disabled = torch.compiler.disable(function)
        return disabled(*args, **kwargs)

    return call
