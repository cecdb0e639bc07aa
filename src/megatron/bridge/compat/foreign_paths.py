# SPDX-License-Identifier: Apache-2.0
"""Modules under the paths at which other programs import them. Importing this module imports no other.

A finder answers for the paths of ``MODULES`` with the module that they stand for, so ``import
megatron.bridge.training.utils.train_utils`` gives ``megatron.bridge.compat.train_utils``. A path that is a file of
this package never comes here, because Python asks this finder last.
"""

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType

_PACKAGE = "megatron.bridge"

MODULES = {
    "models.conversion.peft_bridge": "compat.peft_bridge",
    "training.facade": "compat.training_calls",
    "training.fault_tolerance": "compat.fault_tolerance",
    "training.model_load_save": "compat.model_load_save",
    "training.tokenizers": None,
    "training.tokenizers.config": "data.tokenizer",
    "training.tokenizers.tokenizer": "compat.tokenizer",
    "training.utils": None,
    "training.utils.config_utils": "compat.config_utils",
    "training.utils.flop_utils": "compat.flop_utils",
    "training.utils.packed_seq_utils": "compat.packed_seq_utils",
    "training.utils.pg_utils": "compat.pg_utils",
    "training.utils.sig_utils": "compat.sig_utils",
    "training.utils.train_utils": "compat.train_utils",
    "utils.common_utils": "compat.common_utils",
    "utils.cuda_graph": "compat.cuda_graph",
}
"""Foreign path below ``megatron.bridge`` -> the module it stands for; None is a package of such paths."""


class ForeignPathFinder:
    """Finds the modules of ``MODULES``."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a foreign path, or None for any other name."""
        foreign = name.removeprefix(f"{_PACKAGE}.")
        if foreign == name or foreign not in MODULES:
            return None
        home = MODULES[foreign]
        if home is None:
            return ModuleSpec(name, None, is_package=True)
        return ModuleSpec(name, _StandIn(f"{_PACKAGE}.{home}"))


class _StandIn(Loader):
    """Loads a module under another name: both names are the same module."""

    def __init__(self, home: str) -> None:
        self._home = home

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        self._module = importlib.import_module(self._home)
        self._spec = self._module.__spec__
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = (
            self._spec
        )  # which the import system has replaced by that of the foreign path


def register() -> None:
    """Install the finder; safe to call more than once."""
    if not any(type(finder).__name__ == ForeignPathFinder.__name__ for finder in sys.meta_path):
        sys.meta_path.append(ForeignPathFinder())  # type: ignore[arg-type]
