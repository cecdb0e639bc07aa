# SPDX-License-Identifier: Apache-2.0
"""Access object storage through fsspec: list a URL, download to its local folder, and upload from the folder.

fsspec's file systems read credentials and endpoints from the environment, transfer large files in parallel parts, and
retry failed requests with growing pauses. If the retries fail, a ``StorageError`` is raised.
"""

import errno
import os
import random
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from itertools import batched
from pathlib import Path
from typing import Any, NamedTuple

from megatron.bridge.utils.errors import UserError, misspelling, one_line
from megatron.bridge.utils.optional_imports import missing_message
from megatron.bridge.utils.storage_paths import CACHE, beside, root, split, url_of

AT_ONCE = 8  # files to upload (s3fs sends up to 10 parts of 50 MB of each), and ranges to download
RANGE = 32 << 20
# 8 tries of a request within about a minute, unless an environment variable of AWS or fsspec overrides it
_OPTIONS = {"s3": {"config_kwargs": {"retries": {"mode": "standard", "max_attempts": 8}}}}
_PAUSES = random.SystemRandom()
_NO_STORAGE = ("file", "local", "data", "http", "https")

_OUTSIDE = {".", "..", ""}  # path components that leave a folder

SizeOf = Callable[[str], int | None]


class StorageError(UserError):
    """A bucket cannot be reached, read or written; its earlier content is unchanged."""


class BucketEntry(NamedTuple):
    """A bucket's entry for one file or folder; the tag changes with the content."""

    size: int
    tag: str
    is_folder: bool


def is_url(text: object) -> bool:
    """Return whether ``text`` is a URL of object storage, not of a web page, and not a path."""
    scheme_and_rest = split(text)
    return scheme_and_rest is not None and scheme_and_rest[0] in _known_schemes()


def local(path_or_url: str | Path) -> Path:
    """Return the local folder or file of a URL, which may not exist yet; a path is returned unchanged."""
    scheme_and_rest = split(path_or_url)
    if scheme_and_rest is None or (
        "://" not in str(path_or_url) and scheme_and_rest[0] not in _known_schemes()
    ):
        return Path(path_or_url)
    scheme, rest = scheme_and_rest
    _filesystem_of(scheme)
    if _OUTSIDE & set(rest.split("/")):
        raise UserError(
            f"{scheme}://{rest} has no folder of a bucket: write {scheme}://BUCKET/FOLDER"
        )
    return Path(root(), scheme, rest)


def fetch(path_or_url: str | Path) -> Path:
    """Download the file or all files of the folder at a URL, and return ``local``; a path is returned unchanged."""
    path = local(path_or_url)
    pull(path.parent, {path.name})
    if not path.is_file():
        pull(path, lambda name: True, deep=True, exact=True)
    return path


def listing(folder: Path, deep: bool = False) -> dict[str, BucketEntry]:
    """List the bucket's entries in ``folder`` by relative path; ``deep`` lists the files of all subfolders."""
    from fsspec.utils import tokenize

    with _reaching_storage(folder) as (files, url):
        prefix = files._strip_protocol(url).strip("/") + "/"
        try:
            raw_entries: Any = (
                files.find(url, detail=True).values() if deep else files.ls(url, detail=True)
            )
        except FileNotFoundError:
            return {}
    named = {str(raw_entry["name"]).strip("/"): raw_entry for raw_entry in raw_entries}
    return {
        name.removeprefix(prefix): BucketEntry(
            int(raw_entry.get("size") or 0), tokenize(raw_entry), raw_entry["type"] == "directory"
        )
        for name, raw_entry in named.items()
        if name.startswith(prefix) and not _OUTSIDE & set(name.split("/"))
    }


def sizes(folder: Path) -> SizeOf:
    """Return a function from a file's name to its size in ``folder``, local or in the bucket; None: no such file."""
    if url_of(folder) is None:
        return lambda name: (folder / name).stat().st_size if (folder / name).is_file() else None
    entries = listing(folder, deep=True)
    return lambda name: entries[name].size if name in entries else None


def pull(
    folder: Path,
    wanted_files: Collection[str] | Callable[[str], bool],
    deep: bool = False,
    exact: bool = False,
) -> None:
    """Download the wanted files of ``folder`` whose local copies are not current; without a URL, do nothing.

    ``deep`` also downloads files of subfolders; ``exact`` removes local files that the bucket does not have.
    """
    if url_of(folder) is None or (not callable(wanted_files) and not wanted_files):
        return
    is_wanted = wanted_files if callable(wanted_files) else wanted_files.__contains__
    entries = {
        name: entry
        for name, entry in listing(folder, deep).items()
        if not entry.is_folder and is_wanted(name)
    }
    for some in batched(sorted(entries), 32):
        with ExitStack() as locks:
            _lock_files(locks, [folder / name for name in some])
            _download_files(
                folder,
                {
                    name: entries[name]
                    for name in some
                    if not _is_current(folder / name, entries[name])
                },
            )
    for path in [path for path in folder.rglob("*") if path.is_file()] if exact else ():
        if path.relative_to(folder).as_posix() not in entries:
            path.unlink(missing_ok=True)


def push(
    folder: Path,
    names: Iterable[str],
    target: Path | None = None,
    stop: threading.Event | None = None,
) -> None:
    """Upload files of ``folder`` to its URL or to ``target``'s, until ``stop`` is set."""
    for some in batched(names, AT_ONCE):
        if stop is None or not stop.is_set():
            with _reaching_storage(target or folder) as (files, url):
                files.put([str(folder / name) for name in some], [f"{url}/{name}" for name in some])


def forget(file: Path) -> None:
    """Mark a file as outdated, so that ``pull`` downloads it again."""
    beside(file, ".tag").unlink(missing_ok=True)


def note_current(folder: Path, names: Iterable[str], deep: bool = False) -> None:
    """Mark uploaded files as current, so that they are not downloaded again."""
    entries = listing(folder, deep)
    for name in names:
        beside(folder / name, ".tag").write_text(entries[name].tag)


def write(file: Path, text: str) -> None:
    with _reaching_storage(file) as (files, url):
        files.pipe_file(url, text.encode())


def read(file: Path) -> str | None:
    """Return the text of a file, or None if there is no such file."""
    with _reaching_storage(file) as (files, url):
        try:
            return files.cat_file(url).decode(errors="replace")
        except FileNotFoundError:
            return None


def delete(path: Path) -> None:
    """Remove a file, or all files of a folder."""
    below = [f"/{name}" for name in listing(path, deep=True)] or [""]
    with _reaching_storage(path) as (files, url), suppress(FileNotFoundError):
        files.rm([url + name for name in below])


def _filesystem_of(scheme: str) -> Any:
    import fsspec
    from fsspec.config import conf

    if scheme not in _known_schemes():
        hint = misspelling(scheme, _known_schemes())
        raise UserError(
            f"{scheme}:// is not an object storage of fsspec: use s3://, gs:// or a path{hint}"
        )
    chosen = {"AWS_MAX_ATTEMPTS", "AWS_RETRY_MODE"} & os.environ.keys()
    try:
        options = {
            "use_listings_cache": False,
            **({} if chosen else _OPTIONS.get(scheme, {})),
            **conf.get(scheme, {}),
        }
        filesystem = fsspec.filesystem(scheme, **options)
    except ImportError as error:
        needs = missing_message(f"for {scheme}", f"{scheme}://", "storage", is_setting=False)
        raise UserError(f"{needs} ({one_line(error)})") from error
    _keep_random_state()
    return filesystem


def _keep_random_state() -> None:
    """Draw the pauses between retries from a separate generator: a run saves and restores Python's random state."""
    for name in ("aiohttp.connector", "botocore.retryhandler", "gcsfs.retry"):
        if name in sys.modules:
            vars(sys.modules[name])["random"] = _PAUSES
    if "botocore" in sys.modules:
        start: Any = import_module("botocore.retries.standard").ExponentialBackoff.__init__
        start.__defaults__ = tuple(
            _PAUSES.random if value == random.random else value for value in start.__defaults__
        )


def _known_schemes() -> set[str]:
    from fsspec import available_protocols

    return {name for name in available_protocols() if name not in _NO_STORAGE}


@contextmanager
def _reaching_storage(path: Path) -> Iterator[tuple[Any, str]]:
    """Yield the file system and the URL of a local folder or file; errors become a ``StorageError``."""
    url = url_of(path)
    assert url is not None, f"{path} stands for no URL"
    try:
        yield _filesystem_of(url.partition(":")[0]), url
    except UserError:
        raise
    except Exception as error:
        why = one_line(error) or type(error).__name__
        way_out = "check the URL, and credentials and endpoint in the"
        way_out += " environment, then start again"
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            way_out = f"free some space, or set {CACHE} to a folder on another disk"
        raise StorageError(f"{url} cannot be read or written: {why}; {way_out}") from error


def _is_current(path: Path, entry: BucketEntry) -> bool:
    note = beside(path, ".tag")
    return path.is_file() and note.is_file() and note.read_text() == entry.tag


def _lock_files(locks: ExitStack, paths: Iterable[Path]) -> None:
    """Keep other processes from downloading the same files; all processes acquire the locks in the same order."""
    from filelock import FileLock

    for path in paths:
        locks.enter_context(FileLock(beside(path, ".lock")))


def _download_files(folder: Path, entries: dict[str, BucketEntry]) -> None:
    """Download to temporary files, a few ranges at a time, and rename the complete files."""
    parts = {name: (folder / name).with_name(f".{Path(name).name}.part") for name in entries}
    for part in parts.values():
        part.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(b"")
    places = [
        (name, start) for name, entry in entries.items() for start in range(0, entry.size, RANGE)
    ]
    for some in batched(places, AT_ONCE):
        starts = [start for _, start in some]
        ends = [min(start + RANGE, entries[name].size) for name, start in some]
        with _reaching_storage(folder) as (files, url):
            # unlike ``get``, this retries a range after a lost connection
            contents = files.cat_ranges(
                [f"{url}/{name}" for name, _ in some], starts, ends, on_error="raise"
            )
            for (name, _), content in zip(some, contents, strict=True):
                with parts[name].open("ab") as part:
                    part.write(content)
    for name, part in parts.items():
        if (size := part.stat().st_size) != entries[name].size:
            raise StorageError(
                f"{url_of(folder / name)} returned {size} of {entries[name].size} bytes; start again"
            )
        forget(folder / name)
        part.replace(folder / name)
        beside(folder / name, ".tag").write_text(entries[name].tag)
