# SPDX-License-Identifier: Apache-2.0
"""A folder of files on object storage that counts only once it is whole, such as an exported model.

A record beside the folder, ``exported.incomplete``, says which files have been uploaded, with their hashes. It is
there until the folder is whole: who uploads the same files again after an interruption skips those, and a folder
without it is never written to.
"""

import json
import shutil
from collections.abc import Sequence
from itertools import batched
from pathlib import Path

from megatron.bridge.checkpoint.manifest import files_of, hash_file
from megatron.bridge.utils import storage
from megatron.bridge.utils.atomic import STAGING_SUFFIX
from megatron.bridge.utils.errors import UserError


def prepare(folder: Path) -> None:
    """Refuse a folder with files that no interrupted upload left there, and drop what was downloaded of it."""
    if storage.read(_record(folder)) is None and storage.listing(folder):
        raise UserError(f"output directory {folder} exists and is not empty: remove it or choose another one")
    shutil.rmtree(folder, ignore_errors=True)


def publish(staging: Path, folder: Path, last: Sequence[str]) -> None:
    """Upload the files of ``staging``; at the end, in this order, ``last``, without which no reader takes the rest."""
    hashes = {name: hash_file(staging / name).hash for name in files_of(staging)}
    found, before = storage.listing(folder, deep=True), json.loads(storage.read(_record(folder)) or "{}")
    done = {name: found_hash for name, found_hash in hashes.items() if name in found and before.get(name) == found_hash}
    for name in found.keys() - done.keys():
        storage.delete(folder / name)
    first = [name for name in hashes if name not in (*done, *last)]
    for names in (*batched(first, storage.AT_ONCE), *((name,) for name in last if name not in done)):
        storage.write(_record(folder), json.dumps(done))
        storage.push(staging, names, folder)
        done |= {name: hashes[name] for name in names}
    storage.delete(_record(folder))
    shutil.rmtree(staging, ignore_errors=True)


def _record(folder: Path) -> Path:
    return folder.with_name(folder.name + STAGING_SUFFIX)
