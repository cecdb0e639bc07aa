# SPDX-License-Identifier: Apache-2.0
"""Memory that several processes of one machine see; nothing is left of it when they end."""

import os
import tempfile
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from megatron.bridge.utils.errors import UserError

_MEMORY = Path("/dev/shm")


class SharedBuffer:
    """Bytes in a file in memory, or on disk where memory has no room for files.

    The file is removed as soon as all receivers have opened it: its memory lives as long as somebody maps it.
    """

    def __init__(self, size: int) -> None:
        self.size = max(size, 1)
        self.path = _reserved(self.size)
        self.bytes = attached(self.path, self.size)

    def unlink(self) -> None:
        """Remove the name."""
        with suppress(FileNotFoundError):
            self.path.unlink()


def attached(path: Path, size: int) -> Tensor:
    """The bytes [size] of a buffer that another process has made."""
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)


def _reserved(size: int) -> Path:
    folders = [folder for folder in (_MEMORY, Path(tempfile.gettempdir())) if folder.is_dir()]
    for folder in folders:
        handle, name = tempfile.mkstemp(prefix="megatron-bridge-refit-", dir=folder)
        try:
            os.posix_fallocate(handle, 0, size)
            return Path(name)
        except OSError:
            Path(name).unlink()
        finally:
            os.close(handle)
    raise UserError(
        f"no room for a bucket of {size >> 20} MB in {' or '.join(map(str, folders))}: lower bucket_bytes, or "
        "give the container more shared memory"
    )
