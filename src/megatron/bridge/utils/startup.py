# SPDX-License-Identifier: Apache-2.0
"""Start and end a command faster without Python's garbage collector, and say that it is starting.

Torch and Megatron-Core create half a million permanent objects. If torch is already imported, another program is
running, and these functions do nothing.
"""

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


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


SLOW_LIBRARIES = frozenset(
    {"torch", "transformers", "huggingface_hub", "fastapi", "lm_eval", "nemo_run"}
)


def announce_slow_imports() -> None:
    """Print a line in the terminal when a slow library is first imported, which takes seconds.

    Nothing is printed on other ranks than the first, nor into a file or a pipe.
    """
    is_first_rank = os.environ.get("RANK", "0") == "0"
    if is_first_rank and sys.stderr.isatty() and not SLOW_LIBRARIES & sys.modules.keys():
        sys.meta_path.insert(0, _Announcer())  # type: ignore[arg-type]


class _Announcer:
    """A finder of modules that finds none: it sees the first import of a slow library."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name in SLOW_LIBRARIES:
            sys.meta_path.remove(self)  # type: ignore[arg-type]
            sys.stderr.write("loading libraries ...\n")
            sys.stderr.flush()
