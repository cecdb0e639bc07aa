# SPDX-License-Identifier: Apache-2.0
"""How a command starts, and ends, sooner: Python's collector of garbage has no work that is worth its time then.

Torch and Megatron-Core make half a million objects that stay. Where torch is there before, a program of its own is
running, and nothing here does anything.
"""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_gc() -> Iterator[None]:
    """Look for no garbage during imports, nor later in what they made: a third of the time of a start."""
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def skip_gc_at_exit() -> Iterator[None]:
    """Look for no garbage when the interpreter ends, which takes it up to a second."""
    is_command = "torch" not in sys.modules
    try:
        yield
    finally:
        if is_command:
            gc.freeze()
