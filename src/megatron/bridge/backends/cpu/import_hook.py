# SPDX-License-Identifier: Apache-2.0
"""Patch torch and Megatron-Core for a machine without CUDA when ``megatron.core`` is first imported.

Megatron-Core binds much of CUDA at import: decorators compile, defaults name devices. The CPU device layer
(`megatron.bridge.backends.cpu.device`) must therefore be installed before ``megatron.core`` runs, and some of its
modules are patched right after they ran; if it was imported earlier, `backends.cpu.late_install` patches what is
there. This module only watches imports, also those that `late_imports` defers. It imports no torch, so that
``import megatron.bridge`` stays fast.
"""

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

from megatron.bridge.backends import late_imports

_CORE = "megatron.core"
_PREPARED = "__prepared_by_megatron_bridge__"

# module of Megatron-Core -> function of `device` that patches it after its own code has run
_AFTER = {
    "megatron.core.tensor_parallel.layers": "patch_linear",
    "megatron.core.tensor_parallel.random": "patch_rng_tracker",
    "megatron.core.dist_checkpointing.strategies.filesystem_async": "patch_results_queue",
    "megatron.core.distributed.fsdp.src.megatron_fsdp.megatron_fsdp": "patch_fsdp_device",
}

# module -> function that executes it without what is slow to import
_DEFERRED = {
    "megatron.core.timers": late_imports.load_timers,
    "torch.distributed.tensor._ops._tensor_ops": late_imports.load_tensor_ops,
    "transformers.generation.continuous_batching.cache": late_imports.load_paged_cache,
}


class _CoreFinder:
    """Takes the spec that another finder returns and adds a step around its execution."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _CORE and name not in _AFTER and name not in _DEFERRED:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                return _watch_loader(name, spec)
        return None


def _watch_loader(name: str, spec: ModuleSpec) -> ModuleSpec:
    """The same spec, with a loader that installs the device layer before or patches the module after execution."""
    loader = spec.loader
    if loader is None:  # a namespace package has no loader
        return spec
    execute: Callable[[ModuleType], None] = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        if name in _DEFERRED:
            _DEFERRED[name](module, execute)
            return
        device = importlib.import_module("megatron.bridge.backends.cpu.device")
        if name == _CORE:
            device.install()
            setattr(module, _PREPARED, True)
            with device.core_import_context():
                execute(module)
            return
        execute(module)
        if device.installed():
            getattr(device, _AFTER[name])(module)

    loader.exec_module = exec_module
    return spec


def register() -> None:
    """Install the hook; safe to call more than once.

    If ``megatron.core`` has been imported already, its modules are patched as they are.
    """
    core = sys.modules.get(_CORE)
    if not any(type(finder).__name__ == _CoreFinder.__name__ for finder in sys.meta_path):
        sys.meta_path.insert(0, _CoreFinder())  # type: ignore[arg-type]
    if core is not None and not hasattr(core, _PREPARED):
        _prepare_imported_core()
        setattr(core, _PREPARED, True)


def _prepare_imported_core() -> None:
    """Patch the modules of Megatron-Core that were imported before this package, where there is no GPU."""
    device = importlib.import_module("megatron.bridge.backends.cpu.device")
    if device.has_cuda():
        return
    late = importlib.import_module("megatron.bridge.backends.cpu.late_install")
    late.install_after_core({name: getattr(device, patch) for name, patch in _AFTER.items()})
