# SPDX-License-Identifier: Apache-2.0
"""Optional packages, and names whose modules are imported at their first use."""

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from megatron.bridge.utils.errors import UserError, one_line


def installed(package: str) -> bool:
    """Return whether ``package`` can be imported, without importing it."""
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False


def import_optional(package: str, key: str, extra: str, is_setting: bool = True) -> Any:
    """Import a ``package`` of an extra for ``key``, which is a key of the config (``is_setting``) or a command."""
    try:
        return import_module(package)
    except ImportError as error:
        raise UserError(
            f"{missing_message(package, key, extra, is_setting)} ({one_line(error)})"
        ) from error


def missing_message(package: str, key: str, extra: str, is_setting: bool = True) -> str:
    install = f"install it with `uv pip install 'hf-megatron-bridge[{extra}]'`"
    instead = f", or leave {key.partition('=')[0]} unset" if is_setting else ""
    return f"{key} needs the package {package}, which is not installed: {install}{instead}"


def lazy_names(module: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of ``module`` for public names that ``homes`` maps to ``module:name``."""

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        home, _, attribute = homes[name].partition(":")
        return getattr(import_module(home), attribute)

    return find
