# SPDX-License-Identifier: Apache-2.0
"""Open files that somebody else named, without waiting for a pipe or reading a device."""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_regular_file(path: Path) -> BinaryIO:
    """Open a file for reading.

    Opening a pipe waits until somebody writes to it, and a device such as ``/dev/zero`` never ends.

    Raises:
        OSError: the file cannot be opened, or is a folder, a pipe, a socket or a device.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is a pipe, a socket or a device", str(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular_file(path: Path) -> bytes:
    """Return the content of a file; raise as ``open_regular_file`` does."""
    with open_regular_file(path) as file:
        return file.read()
