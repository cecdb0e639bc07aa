# SPDX-License-Identifier: Apache-2.0
"""The limits that a shell or a scheduler sets on a process (``ulimit``), and errors that come from them."""

import errno
import re
import resource

OPEN_FILES = 1024
"""A process of a run holds about 130 files and connections, and one more for each rank that it talks to."""

_NO_FILES = re.compile(r"Too many open files")
_NO_MEMORY = re.compile(
    r"failed to map segment|cannot allocate memory|can't allocate memory|not enough memory",
    re.IGNORECASE,
)


def raise_limit_of_open_files() -> None:
    """Use as many open files as the hard limit allows: the soft limit of many shells is 256 or 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft not in (hard, resource.RLIM_INFINITY):
        resource.setrlimit(resource.RLIMIT_NOFILE, (_allowed(hard), hard))


def _allowed(hard: int) -> int:
    # macOS refuses an unlimited soft limit, and some programs close every file below the limit one by one
    limit = 65_536
    return limit if hard == resource.RLIM_INFINITY else min(hard, limit)


def describe_shortage(error: BaseException) -> str | None:
    """Return a sentence if ``error`` says that the process may not open more files or use more memory, else None."""
    text = str(error)
    if getattr(error, "errno", None) == errno.EMFILE or _NO_FILES.search(text):
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return (
            f"this process may open only {limit} files and connections: raise the limit to at least {OPEN_FILES} "
            f"(ulimit -n {OPEN_FILES})"
        )
    is_memory_error = (
        isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM
    )
    if is_memory_error or (
        isinstance(error, ImportError | RuntimeError) and _NO_MEMORY.search(text)
    ):
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit == resource.RLIM_INFINITY:
            return None  # the machine's memory is used up: the traceback says by what
        return (
            f"this process may use only {limit / 1e9:.1f} GB of address space, which is too little: raise the limit "
            "(ulimit -v unlimited)"
        )
    return None
