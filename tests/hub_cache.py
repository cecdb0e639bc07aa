# SPDX-License-Identifier: Apache-2.0
"""A cache of the hub that holds models of the tests, and no network."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from huggingface_hub import constants

REVISION = "0" * 40


def snapshot_folder(cache: Path, name: str) -> Path:
    """Where the files of the model ``name`` belong in ``cache``."""
    repository = cache / f"models--{name.replace('/', '--')}"
    folder = repository / "snapshots" / REVISION
    folder.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(REVISION)
    return folder


@contextmanager
def only(cache: Path) -> Iterator[None]:
    """Let this process find on the hub what ``cache`` holds, and nothing else."""
    with mock.patch.multiple(constants, HF_HUB_CACHE=str(cache), HF_HUB_OFFLINE=True):
        yield
