# SPDX-License-Identifier: Apache-2.0
"""Whether a corpus still holds what was written, by hashes of a part of its files."""

import hashlib
from pathlib import Path

from megatron.bridge.utils.errors import UserError

BLOCK = 1 << 16
BLOCKS = 16
"""Up to 1 MiB of a file are read whole, and of a larger one this many blocks: always the first and the last."""


def digest(path: Path) -> str:
    """A hash of the size of a file, and of up to ``BLOCKS`` blocks that lie evenly in it."""
    found = hashlib.blake2b(digest_size=16)
    size = path.stat().st_size
    found.update(str(size).encode())
    last = max(size - BLOCK, 0)
    count = min(BLOCKS, -(-size // BLOCK))
    with path.open("rb") as file:
        for number in range(count):
            file.seek(last * number // max(count - 1, 1))
            found.update(file.read(BLOCK))
    return found.hexdigest()


def check(prefix: str, written: dict[str, str]) -> None:
    """Compare the files of a corpus with the digests that were kept when it was written.

    Args:
        prefix: Path of the corpus without endings.
        written: Digest by ending. Corpora of other tools have none.
    """
    for ending, expected in written.items():
        path = Path(prefix + ending)
        if not path.is_file() or digest(path) != expected:
            state = "has changed" if path.is_file() else "is lost"
            raise UserError(
                f"the corpus {path} {state} since `megatron-bridge data preprocess` wrote it: copy or write it again, "
                f"or delete {prefix}.source.json if the change is meant"
            )
