# SPDX-License-Identifier: Apache-2.0
"""Directories and files that appear whole or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron.bridge.utils.errors import UserError

STAGING_SUFFIX = ".incomplete"


def staging_path(final: Path) -> Path:
    """Where ``final`` is written before it is published: beside it, so that the rename is atomic."""
    return final.with_name(final.name + STAGING_SUFFIX)


def refuse_existing(final: Path) -> None:
    """Raise a ``UserError`` if ``final`` exists and is not an empty directory."""
    if final.exists() and not (final.is_dir() and not any(final.iterdir())):
        raise UserError(f"output directory {final} exists and is not empty: remove it or choose another one")


def create_staging(final: Path, overwrite: bool = False) -> Path:
    """Make an empty directory beside ``final``, removing what an interrupted writer left there."""
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
    """Flush every file of ``staging`` to disk, then rename it to ``final``, replacing what is there.

    A directory cannot be replaced in one step: the old one is moved aside first and removed last, so a kill
    between the two leaves both copies on disk.
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

    It has the same name, for writers that look at suffixes, in a folder of its own, so that nobody who lists the
    files beside ``path`` takes what a killed process left for a file.
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
    """Make a file durable, or renames within a directory, and put them before those that follow."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_text(path: Path, what: str) -> str:
    """The text of a file that the user named; ``what`` is the key and its value, for messages."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UserError(f"{what} cannot be read: {reason}") from error


@contextmanager
def refuse_unwritable(what: str, way_out: str = "choose another folder") -> Iterator[None]:
    """Turn an ``OSError`` inside into a ``UserError`` about ``what``, such as ``logger.log_dir=runs``."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{what} cannot be written: {error.strerror}; {way_out}") from error
