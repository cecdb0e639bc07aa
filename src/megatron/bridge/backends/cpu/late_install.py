# SPDX-License-Identifier: Apache-2.0
"""Install the CPU device layer after Megatron-Core has been imported, as frameworks do that import it first.

Modules of Megatron-Core that are there already hold what the layer replaces: names that they imported from torch or
from each other, and small functions that ``jit_fuser`` has wrapped for compilation.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron.bridge.backends.cpu import device

_CORE = "megatron.core"
_TORCH_NAMESPACES = (torch, torch.cuda, torch.cuda.random, dist, distributed_c10d)

Objects = dict[int, Any]
"""Objects by the ``id`` of what they replace."""


def install_after_core(patches: dict[str, Callable[[ModuleType], None]]) -> None:
    """Install the device layer and bring the imported modules of Megatron-Core into the state that it makes.

    Args:
        patches: What the layer does to a module of Megatron-Core after its import, by the name of the module.
    """
    modules = _imported_core_modules()
    namespaces: list[Any] = [
        *_TORCH_NAMESPACES,
        *(modules[name] for name in patches if name in modules),
    ]
    with _record_replacements(namespaces) as replacements:
        device.install()
        for name, patch in patches.items():
            if name in modules:
                patch(modules[name])
    replacements |= _uncompiled_functions(modules.values())
    for module in modules.values():
        _replace_members(module, replacements)
        for kind in _classes_of(module):
            _replace_members(kind, replacements)
    _adopt_rng_tracker(modules)
    device.silence_core_warnings()


def _imported_core_modules() -> dict[str, ModuleType]:
    return {
        name: module
        for name, module in list(sys.modules.items())
        if name == _CORE or name.startswith(f"{_CORE}.")
    }


@contextmanager
def _record_replacements(namespaces: list[Any]) -> Iterator[Objects]:
    """Yield a dict that holds, after the context, what its body replaced in ``namespaces``."""
    before = [dict(vars(namespace)) for namespace in namespaces]
    replacements: Objects = {}
    yield replacements
    for namespace, members in zip(namespaces, before, strict=True):
        for name, old in members.items():
            new = vars(namespace).get(name, old)
            if new is not old and callable(old):
                replacements[id(old)] = new
    # the replaced objects stay alive, so that their ids stay theirs
    replacements[id(before)] = before


def _uncompiled_functions(modules: Any) -> Objects:
    """Return the plain function of each function that ``jit_fuser`` wrapped, see ``device.core_import_context``."""
    plain: Objects = {}
    for module in modules:
        for namespace in (module, *_classes_of(module)):
            for member in vars(namespace).values():
                function = getattr(member, "_torchdynamo_orig_callable", None)
                if function is not None:
                    plain[id(member)] = function
    return plain


def _classes_of(module: ModuleType) -> list[type]:
    """Return the classes that ``module`` defines."""
    return [
        member
        for member in vars(module).values()
        if isinstance(member, type) and member.__module__ == module.__name__
    ]


def _replace_members(namespace: Any, replacements: Objects) -> None:
    for name, member in list(vars(namespace).items()):
        if not name.startswith("__") and id(member) in replacements:
            setattr(namespace, name, replacements[id(member)])


def _adopt_rng_tracker(modules: dict[str, ModuleType]) -> None:
    """Let the tracker that exists already, with its states, behave like those that are made from now on."""
    random: Any = modules.get(f"{_CORE}.tensor_parallel.random")
    tracker = random and random._CUDA_RNG_STATE_TRACKER
    if tracker is not None:
        tracker.__class__ = random.CudaRNGStatesTracker
