# SPDX-License-Identifier: Apache-2.0
"""Public names of a module whose code is elsewhere: imported when they are first used, which makes no cycle."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(module: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """The ``__getattr__`` of ``module``.

    Args:
        module: Its name.
        homes: Public name -> ``module:name`` where it is defined.
    """

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        home, _, own = homes[name].partition(":")
        return getattr(import_module(home), own)

    return find
