# SPDX-License-Identifier: Apache-2.0
"""Directories and files that are written atomically."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron.bridge.utils.errors import UserError
from megatron.bridge.utils.regular_files import read_regular_file

STAGING_SUFFIX = ".incomplete"


def staging_path(final: Path) -> Path:
    """Return the path of ``final`` before it is published: in the same folder, so that the rename is atomic."""
    return final.with_name(final.name + STAGING_SUFFIX)


def refuse_existing(final: Path) -> None:
    """Raise a ``UserError`` if ``final`` exists and is not an empty directory."""
    if final.exists() and not (final.is_dir() and not any(final.iterdir())):
        raise UserError(
            f"output directory {final} exists and is not empty: remove it or choose another one"
        )


def create_staging(final: Path, overwrite: bool = False) -> Path:
    """Create an empty directory next to ``final``, and remove the files of an interrupted writer there."""
    if not overwrite:
        refuse_existing(final)
    staging = staging_path(final)
    try:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"cannot write to {final.parent}: {error.strerror}") from error
    return staging


def publish(staging: Path, final: Path) -> None:
    """Flush every file of ``staging`` to disk, then rename it to ``final``, which is replaced.

    A directory cannot be replaced in one step: the old one is moved away first and removed last, so an interruption
    between these steps leaves both copies on disk.
    """
    flush(staging)
    retired = final.with_name(final.name + ".replaced")
    if final.exists():
        shutil.rmtree(retired, ignore_errors=True)
        final.replace(retired)
    staging.replace(final)
    fsync(final.parent)
    shutil.rmtree(retired, ignore_errors=True)


def flush(directory: Path) -> None:
    """Make every file of ``directory`` durable."""
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            fsync(path)
    fsync(directory)


@contextmanager
def published_directory(final: Path, overwrite: bool = False) -> Iterator[Path]:
    """Yield a directory to write into; on success it becomes ``final``, on an error it is removed."""
    staging = create_staging(final, overwrite)
    try:
        yield staging
        publish(staging, final)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


@contextmanager
def published_file(path: Path) -> Iterator[Path]:
    """Yield a path to write to; on success it becomes ``path``, durably, and on an error it is removed.

    It has the same name, for writers that check suffixes, but is in a separate folder, so that a file of a killed
    process does not appear in a list of the files next to ``path``.
    """
    staging = path.with_name(f".{path.name}.{os.getpid()}{STAGING_SUFFIX}")
    staging.mkdir(exist_ok=True)
    try:
        yield staging / path.name
        fsync(staging / path.name)
        (staging / path.name).replace(path)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    fsync(path.parent)


def write_text(path: Path, text: str) -> None:
    with published_file(path) as aside:
        aside.write_text(text)


def fsync(path: Path) -> None:
    """Flush a file, or the renames within a directory, to disk before later writes."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_text(path: Path, setting: str) -> str:
    """Read the text of a file that the user named; ``setting`` is the key and its value, for messages."""
    try:
        return read_regular_file(path).decode("utf-8").replace("\r\n", "\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UserError(f"{setting} cannot be read: {reason}") from error


@contextmanager
def refuse_unwritable(setting: str, way_out: str = "choose another folder") -> Iterator[None]:
    """Convert an ``OSError`` inside to a ``UserError`` about ``setting``, such as ``logger.log_dir=runs``."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{setting} cannot be written: {error.strerror}; {way_out}") from error
