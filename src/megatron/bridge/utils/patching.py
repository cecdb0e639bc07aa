# SPDX-License-Identifier: Apache-2.0
"""Replace attributes of modules, classes and objects inside a context."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def patched(owner: Any, **values: Any) -> Iterator[None]:
    """Set attributes that ``owner`` has to ``values`` inside the context."""
    before = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)
