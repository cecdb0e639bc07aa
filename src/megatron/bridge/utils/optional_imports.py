# SPDX-License-Identifier: Apache-2.0
"""Packages that only some runs need."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from megatron.bridge.utils.errors import UserError, one_line


def installed(package: str) -> bool:
    """Whether ``package`` can be imported, without importing it."""
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # of the package above it
        return False


def import_optional(package: str, key: str, extra: str) -> Any:
    """The module ``package``.

    Args:
        package: dotted name.
        key: what in the config asks for it.
        extra: the extra of this project that installs it.

    Raises:
        UserError: it is not installed, or lacks a part that it needs itself.
    """
    try:
        return import_module(package)
    except ImportError as error:
        raise UserError(f"{missing_message(package, key, extra)} ({one_line(error)})") from error


def missing_message(package: str, key: str, extra: str) -> str:
    """The sentence for a package that is not installed."""
    return (
        f"{key} needs the package {package}, which is not installed: install it with "
        f"`uv pip install 'hf-megatron-bridge[{extra}]'`, or leave {key.partition('=')[0]} unset"
    )
