# SPDX-License-Identifier: Apache-2.0
"""Publishing a model into a folder that may hold other files, so that no reader ever sees a mixture of two saves.

A reader finds the weights through one file: ``model.safetensors``, or the index of the shards. It comes last, in
one rename; shards never take the name of a file that is there. A record of what was published tells the files of
earlier saves, which may be replaced, from everything else, which is never touched.

A folder on object storage counts only when it is complete. Until then, a record next to it, ``exported.incomplete``,
lists the uploaded files with their hashes. An upload of the same files after an interruption skips these, and a folder
without a record is never written to.
"""

import json
import shutil
from collections.abc import Iterable, Sequence
from fnmatch import fnmatch
from itertools import batched, count
from pathlib import Path
from typing import Any

from megatron.bridge.checkpoint.manifest import files_of, hash_file
from megatron.bridge.models.hf_pretrained.hub import CONFIG, WEIGHT_PATTERNS
from megatron.bridge.models.hf_pretrained.safetensors_files import INDEX, SINGLE
from megatron.bridge.utils import atomic, storage
from megatron.bridge.utils.atomic import staging_path
from megatron.bridge.utils.errors import UserError
from megatron.bridge.utils.storage_paths import url_of

RECORD = ".megatron-bridge.json"
"""The record: name -> [bytes, time of the last change in ns] of each file that a save published.

While a save publishes, a file that it replaces has two of them: it may have been killed before or after.
"""
_ADAPTER = "adapter_model.safetensors"
_ENTRY_POINTS = (SINGLE, INDEX, _ADAPTER)
_CONFIGS = (
    "adapter_config.json",
    CONFIG,
)  # without one, no reader takes a folder in a bucket for a model
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)

Stamp = list[int]
Stamps = dict[str, Stamp]


def create_staging(folder: Path, overwrite: bool = True) -> Path:
    """An empty directory next to ``folder`` to write into.

    Args:
        folder: where the files will be published; it may hold other files.
        overwrite: replace the weights of an earlier save.
    """
    if folder.is_file():
        raise UserError(f"output directory {folder} is a file: choose another one")
    if url_of(folder) is not None:
        prepare_in_bucket(folder)
    _refuse_weights(folder, overwrite)
    return atomic.create_staging(folder, overwrite=True)


def publish(staging: Path, folder: Path) -> None:
    """Make the files of ``staging`` those of ``folder``, and remove the weights of an earlier save.

    Killed at any moment, this leaves the earlier model, the new one, or none that a reader accepts. The next save
    cleans up.
    """
    files = sorted(path for path in staging.rglob("*") if path.is_file())
    new = {str(path.relative_to(staging)): _stamp_of(path) or [] for path in files}
    if url_of(folder) is not None:
        publish_in_bucket(
            staging, folder, last=[name for name in (*_ENTRY_POINTS, *_CONFIGS) if name in new]
        )
        return
    if not folder.exists() or not any(folder.iterdir()):
        _write_record(staging, new)
        atomic.publish(staging, folder)
        return
    old = published(folder)
    weights = [name for name in new if _is_weight(name)]
    side = [name for name in new if name not in weights and _may_write(staging, folder, name, old)]
    atomic.flush(staging)
    _write_record(folder, old, {name: new[name] for name in (*weights, *side)})
    if any(name in old for name in side):  # not weights of one save with the config of another
        _remove_files(folder, [name for name in _ENTRY_POINTS if name in old])
    _move_files(staging, folder, [*side, *(name for name in weights if name not in _ENTRY_POINTS)])
    _move_files(staging, folder, [name for name in _ENTRY_POINTS if name in new])
    gone = [name for name in old if _is_weight(name) and name not in new]
    _remove_files(folder, sorted(gone, key=lambda name: name not in _ENTRY_POINTS))
    remaining = {name: stamp for name, stamp in old.items() if name not in gone}
    _write_record(folder, {**remaining, **{name: new[name] for name in (*weights, *side)}})
    shutil.rmtree(staging, ignore_errors=True)


def published(folder: Path) -> Stamps:
    """The files of earlier saves that are as these left them."""
    try:
        records: Any = json.loads((folder / RECORD).read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(records, dict):
        return {}
    now = {name: _stamp_of(folder / name) for name in records}
    return {
        name: stamp for name, stamp in now.items() if stamp is not None and stamp in records[name]
    }


def unused_names(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Names of shards -> names that no file of ``folder`` has, such as ``model-00001-of-00002-v2.safetensors``."""
    shards = [name for name in names if name not in _ENTRY_POINTS]
    for version in count(1):
        mark = f"-v{version}" if version > 1 else ""
        renamed = {name: f"{Path(name).stem}{mark}{Path(name).suffix}" for name in shards}
        if not any((folder / name).exists() for name in renamed.values()):
            return renamed
    raise AssertionError


def _refuse_weights(folder: Path, overwrite: bool) -> None:
    held = (
        [path.name for path in folder.iterdir() if _is_weight(path.name)] if folder.is_dir() else []
    )
    written_before = published(folder) if held else {}
    for name in sorted(held):
        if name not in written_before:
            raise UserError(
                f"output directory {folder} exists and holds {name}, which no save of this package wrote: "
                "remove it or choose another directory"
            )
        if not overwrite:
            raise UserError(
                f"output directory {folder} exists and is not empty: it holds {name} of an earlier save; "
                "remove it, choose another one, or set overwrite=True (--overwrite on the command line)"
            )


def _is_weight(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in WEIGHT_PATTERNS)


def _may_write(staging: Path, folder: Path, name: str, old: Stamps) -> bool:
    """Whether a side file is to be written; a file of somebody else stays, and so does one with the same bytes."""
    existing = folder / name
    if not existing.exists():
        return True
    if existing.is_file() and existing.read_bytes() == (staging / name).read_bytes():
        return False
    if name in old:
        return True
    if name == "config.json":
        _refuse_other_model(staging / name, existing)
    return False


def _refuse_other_model(new_file: Path, existing_file: Path) -> None:
    try:
        config = json.loads(new_file.read_text())
        existing = json.loads(existing_file.read_text())
    except ValueError as error:
        raise UserError(
            f"{existing_file} is not JSON: remove it or choose another directory"
        ) from error
    for key in _SIZES:
        if key in config and key in existing and config[key] != existing[key]:
            raise UserError(
                f"{existing_file} has {key}={existing[key]} and the model has {key}={config[key]}: remove that file or "
                "choose another directory"
            )


def _stamp_of(path: Path) -> Stamp | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return [status.st_size, status.st_mtime_ns]


def _write_record(folder: Path, *saves: Stamps) -> None:
    names = sorted({name for save in saves for name in save})
    record = {name: [save[name] for save in saves if name in save] for name in names}
    atomic.write_text(folder / RECORD, json.dumps(record) + "\n")


def _move_files(staging: Path, folder: Path, names: Iterable[str]) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (staging / name).replace(folder / name)
    atomic.fsync(folder)


def _remove_files(folder: Path, names: Iterable[str]) -> None:
    for name in names:
        (folder / name).unlink(missing_ok=True)
    atomic.fsync(folder)


def prepare_in_bucket(folder: Path) -> None:
    """Refuse a folder with files that no interrupted upload left there, and drop what was downloaded of it."""
    if storage.read(staging_path(folder)) is None and storage.listing(folder):
        raise UserError(
            f"output directory {folder} exists and is not empty: remove it or choose another one"
        )
    shutil.rmtree(folder, ignore_errors=True)


def publish_in_bucket(staging: Path, folder: Path, last: Sequence[str]) -> None:
    """Upload the files of ``staging``; at the end, in this order, ``last``, without which no reader takes the rest."""
    hashes = {name: hash_file(staging / name).hash for name in files_of(staging)}
    uploaded = storage.listing(folder, deep=True)
    before = json.loads(storage.read(staging_path(folder)) or "{}")
    done = {
        name: found_hash
        for name, found_hash in hashes.items()
        if name in uploaded and before.get(name) == found_hash
    }
    for name in uploaded.keys() - done.keys():
        storage.delete(folder / name)
    first = [name for name in hashes if name not in (*done, *last)]
    for names in (
        *batched(first, storage.AT_ONCE),
        *((name,) for name in last if name not in done),
    ):
        storage.write(staging_path(folder), json.dumps(done))
        storage.push(staging, names, folder)
        done |= {name: hashes[name] for name in names}
    storage.delete(staging_path(folder))
    shutil.rmtree(staging, ignore_errors=True)
