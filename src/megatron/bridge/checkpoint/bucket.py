# SPDX-License-Identifier: Apache-2.0
"""Checkpoints on object storage, where nothing can be renamed and a folder cannot appear at once.

::

    s3://bucket/run/iter_0000010/               as on a disk; one published checkpoint, because there is no
    s3://bucket/run/iter_0000010.incomplete     mark: it is written before the first file, and deleted after the last

A checkpoint with its mark does not exist for readers, and the next save removes what there is of it. Shards have names
that no other save uses, so a process that still uploads for an earlier attempt cannot touch a published one.

The functions take the local folders that stand for URLs; nothing is done to others.
"""

import random
import shutil
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from megatron.bridge.utils import storage
from megatron.bridge.utils.atomic import STAGING_SUFFIX, staging_path
from megatron.bridge.utils.storage_paths import beside, url_of

ITERATION, SHARD = "iter_", ".distcp"
STARTS = "starts"  # numbered folders, one of each start of a run
LOCK = "run.lock"
_NOT_UPLOADED = (ITERATION, LOCK, ".")


def is_small(name: str) -> bool:
    """Whether a file of a checkpoint is not a shard, so that every process reads it."""
    return not name.endswith(SHARD)


def final_of(staging: Path) -> Path:
    """The directory as which ``saving`` will publish ``staging``."""
    return staging.with_name(staging.name.removesuffix(STAGING_SUFFIX).rpartition(".")[0])


def token_of(staging: Path) -> str:
    """The part of a staging directory's name that is unique to the save."""
    return staging.name.removesuffix(STAGING_SUFFIX).rpartition(".")[2]


def begin(directory: Path) -> None:
    """Hide ``directory`` from readers until ``publish``, and remove the files of earlier saves."""
    storage.write(staging_path(directory), "files next to this one are being written or removed\n")
    storage.delete(directory)


def publish(directory: Path, sizes: Mapping[str, int]) -> None:
    """Make ``directory`` visible to readers, after checking that all files were uploaded."""
    uploaded = {name: entry.size for name, entry in storage.listing(directory, deep=True).items()}
    lost = sorted(name for name, size in sizes.items() if uploaded.get(name) != size)
    if lost:
        raise storage.StorageError(
            f"{directory} was not uploaded: {lost[0]} is missing or has another size; try again"
        )
    storage.delete(staging_path(directory))


def keep(staging: Path) -> None:
    """Keep the local files of a published checkpoint, so that a restart need not download it, and delete all others."""
    directory = final_of(staging)
    forget(path for path in directory.parent.glob(f"{ITERATION}*") if path != staging)
    staging.replace(directory)
    names = [
        path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()
    ]
    storage.note_current(directory, names, deep=True)


def remove(directory: Path) -> None:
    begin(directory)
    storage.delete(staging_path(directory))
    forget([directory])


def forget(directories: Iterable[Path]) -> None:
    """Remove the local files of checkpoints that are in the bucket."""
    for directory in directories:
        shutil.rmtree(beside(directory, ""), ignore_errors=True)
        shutil.rmtree(directory, ignore_errors=True)


def recover(root: Path) -> None:
    """Remove checkpoints that were not published, or only partly removed; the run that writes here calls this."""
    for name in storage.listing(root):
        if name.startswith(ITERATION) and name.endswith(STAGING_SUFFIX):
            remove(root / name.removesuffix(STAGING_SUFFIX))


def refresh(root: Path) -> None:
    """Update the local folder of a run or a checkpoint: which checkpoints exist, and their small files."""
    if url_of(root) is None:
        return
    entries = storage.listing(root)
    is_hidden = root.name.startswith(ITERATION) and root.name + STAGING_SUFFIX in storage.listing(
        root.parent
    )
    if not entries or is_hidden:
        return
    hidden = {
        name.removesuffix(STAGING_SUFFIX) for name in entries if name.endswith(STAGING_SUFFIX)
    }
    folders = {name for name, entry in entries.items() if entry.is_folder} - hidden - {LOCK}
    root.mkdir(parents=True, exist_ok=True)
    forget(
        path
        for path in root.glob(f"{ITERATION}*")
        if "." not in path.name and path.name not in folders
    )
    starts = (
        {f"{STARTS}/{name}" for name in storage.listing(root / STARTS)}
        if STARTS in folders
        else set[str]()
    )
    for name in sorted(folders | starts):
        (root / name).mkdir(exist_ok=True)
    storage.pull(root, lambda name: is_small(name) and not name.endswith(STAGING_SUFFIX))


def push_beside(root: Path) -> None:
    """Upload the other files of a run, such as its metrics, that have changed since the last upload."""
    if url_of(root) is None:
        return
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        name = path.relative_to(root).as_posix()
        note = beside(path, ".pushed")
        stamp = f"{path.stat().st_mtime_ns} {path.stat().st_size}"
        if not name.startswith(_NOT_UPLOADED) and not (
            note.is_file() and note.read_text() == stamp
        ):
            storage.push(root, [name])
            storage.note_current(path.parent, [path.name])
            note.write_text(stamp)


def claim(record: Path, text: str) -> Path | None:
    """Upload ``record`` as the lock of a run; returns None and removes it if another process has claimed the lock.

    Object storage lists earlier writes: if two processes claim at once, the later one sees the other's record. If both
    see the other's, both try again after different pauses.
    """
    storage.write(record, text)
    if storage.listing(record.parent).keys() == {record.name}:
        return record
    storage.delete(record)
    time.sleep(
        random.SystemRandom().uniform(0.0, 0.5)
    )  # the random state of the run stays as it is
    return None
