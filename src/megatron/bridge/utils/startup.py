# SPDX-License-Identifier: Apache-2.0
"""Start and end a command faster without Python's garbage collector.

Torch and Megatron-Core create half a million permanent objects. If torch is already imported, another program is
running, and these functions do nothing.
"""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_gc() -> Iterator[None]:
    """Disable garbage collection during imports and exempt their objects later: saves a third of the start time."""
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
    """Skip the garbage collection at the end of the interpreter, which takes up to a second."""
    is_command = "torch" not in sys.modules
    try:
        yield
    finally:
        if is_command:
            gc.freeze()
