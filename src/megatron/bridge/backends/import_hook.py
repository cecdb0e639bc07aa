# SPDX-License-Identifier: Apache-2.0
"""Prepare Megatron-Core for this machine at the moment it is first imported.

Megatron-Core binds much of what it needs from CUDA at import: decorators compile, defaults name devices. The CPU
device layer (`megatron.bridge.backends.device`) must therefore be in place before the first line of
``megatron.core`` runs, and a few of its modules are adjusted right after they ran. This module only watches
imports; it imports no torch itself, so that ``import megatron.bridge`` stays cheap.
"""

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

_CORE = "megatron.core"
_PREPARED = "__prepared_by_megatron_bridge__"

# Module of Megatron-Core -> function of `device` that adjusts it once its own code has run.
_AFTER = {
    "megatron.core.tensor_parallel.random": "draw_from_the_cpu_generator",
    "megatron.core.dist_checkpointing.strategies.filesystem_async": "collect_write_results_in_process",
    "megatron.core.distributed.fsdp.src.megatron_fsdp.megatron_fsdp": "answer_with_the_cpu_for_an_index",
}


class _CoreFinder:
    """Finds nothing itself: takes the spec that the other finders give and adds a step around its execution."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _CORE and name not in _AFTER:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                return _watched(name, spec)
        return None


def _watched(name: str, spec: ModuleSpec) -> ModuleSpec:
    """The same spec, whose loader prepares the machine before, or adjusts the module after, executing it."""
    loader = spec.loader
    if loader is None:  # a namespace without code: nothing will be executed
        return spec
    execute: Callable[[ModuleType], None] = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        device = importlib.import_module("megatron.bridge.backends.device")
        if name == _CORE:
            device.install()
            setattr(module, _PREPARED, True)
            with device.importing_core():
                execute(module)
            return
        execute(module)
        if device.installed():
            getattr(device, _AFTER[name])(module)

    loader.exec_module = exec_module
    return spec


def register() -> None:
    """Install the hook; safe to call more than once.

    Raises:
        ImportError: ``megatron.core`` is already imported, unprepared, on a machine without CUDA.
    """
    core = sys.modules.get(_CORE)
    if core is not None and not hasattr(core, _PREPARED):
        _accept_only_with_cuda()
        return
    if not any(type(finder).__name__ == _CoreFinder.__name__ for finder in sys.meta_path):
        sys.meta_path.insert(0, _CoreFinder())  # type: ignore[arg-type]


def _accept_only_with_cuda() -> None:
    import torch

    if not torch.cuda.is_available():
        raise ImportError(
            "megatron.core was imported before megatron.bridge, and this machine has no CUDA device: "
            "put `import megatron.bridge` above the first import of megatron.core"
        )
