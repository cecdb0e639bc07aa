# SPDX-License-Identifier: Apache-2.0
"""Load a sharded state dict in Megatron-Core's ``torch_dist`` format; damaged and foreign checkpoints are refused."""

import pickle
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingConfig
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.utils import extract_sharded_base
from torch.distributed.checkpoint import CheckpointException, Metadata
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron.bridge.checkpoint import (
    bucket,
    inplace_reader,  # noqa: F401 - Megatron-Core reads with it
    manifest,
)
from megatron.bridge.checkpoint.collective import on_every_rank, on_first_rank, root_cause
from megatron.bridge.checkpoint.manifest import DamagedError
from megatron.bridge.checkpoint.replicas import digest
from megatron.bridge.utils import distributed, storage, strict_json, unpickling
from megatron.bridge.utils.errors import UserError, first_few

FORMAT = CheckpointingConfig("torch_dist", 1)
COMMON_STATE = "common_state"

StoredShapes = dict[
    str, tuple[int, ...] | None
]  # name -> global shape of a tensor, or None for an object


@dataclass(frozen=True)
class StateMismatch:
    """Differences between the state that a model needs and the state that a checkpoint holds."""

    missing: tuple[str, ...]
    left_over: tuple[str, ...]
    shapes: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.missing or self.left_over or self.shapes)

    def __str__(self) -> str:
        names_by_title = {
            "it lacks": self.missing,
            "it also holds": self.left_over,
            "shapes differ:": self.shapes,
        }
        return "; ".join(
            f"{title} {first_few(names)}" for title, names in names_by_title.items() if names
        )


def load(
    state: dict[str, Any], directory: Path, strict: bool = True, known: Iterable[str] = ()
) -> dict[str, Any]:
    """Fill the tensors of ``state`` in place from ``directory`` and return the full state.

    Args:
        state: Megatron's sharded state dict of what is wanted, under any parallel layout.
        strict: Whether what the checkpoint holds beyond ``state`` is an error.
        known: Prefixes of names that may be left over even so. Transformer Engine's ``_extra_state`` may
            always be missing or left over.
    """
    check(state, directory, strict, known)
    try:
        return on_every_rank(lambda: _read_state(state, directory))
    except BaseException as error:
        raise unreadable(error, directory) from error


def check(
    state: dict[str, Any], directory: Path, strict: bool = True, known: Iterable[str] = ()
) -> None:
    """Check that ``load`` will find everything in ``state``; its tensors need no memory."""
    stored = stored_keys(on_first_rank(lambda: check_files(directory)))
    _drop_extra_state(state, stored)
    difference = compare(wanted_keys(state), stored, tuple(known) if strict else ("",))
    if difference:
        raise UserError(
            f"checkpoint {directory} is not of this model: {difference}; load it into the model it was saved from"
        )


def read(state: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Load a part of a checked state, without communication; raises a ``DamagedError`` if it cannot be read."""
    try:
        return _read_state(state, directory)
    except BaseException as error:
        raise unreadable(error, directory) from error


def _read_state(state: dict[str, Any], directory: Path) -> dict[str, Any]:
    storage.pull(directory, bucket.is_small)  # on other machines than the first rank's
    # Under another layout ranks share one object of the old one, which Megatron-Core takes for a mistake: what is
    # wanted was compared with what there is, so its own check of the wish can go.
    with without_torch_warnings():
        return cast(
            dict[str, Any],
            serialization.load(state, str(directory), validate_access_integrity=False),
        )


@contextmanager
def without_torch_warnings() -> Iterator[None]:
    """Silence torch's warnings at every save and load, which expect ranks to read together."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        warnings.filterwarnings("ignore", message="The argument order of load")
        warnings.filterwarnings("ignore", message="Please use DTensor instead")  # stacked experts
        yield


def load_common(directory: Path) -> dict[str, Any]:
    """Load the part of a checkpoint that is not sharded; rank 0 reads it and broadcasts it."""

    def read() -> dict[str, Any]:
        check_files(directory)
        with without_torch_warnings():
            return serialization.load_common_state_dict(str(directory))

    try:
        return on_first_rank(read)
    except BaseException as error:
        raise unreadable(error, directory) from error


def check_files(directory: Path) -> Metadata:
    """Read the metadata and check that every file it names has its full size; reads no tensors."""
    storage.pull(directory, bucket.is_small)
    size_of = storage.sizes(directory)
    _check_format(directory)
    metadata = _read_metadata(directory)
    save_id = getattr(metadata.storage_meta, "save_id", None) or ""
    if save_id.startswith(manifest.SAVE_ID_PREFIX) and not (directory / manifest.NAME).is_file():
        raise DamagedError.of(directory, f"{manifest.NAME} is missing")
    needed: dict[str, int] = {}
    for storage_info in metadata.storage_data.values():
        needed[storage_info.relative_path] = max(
            needed.get(storage_info.relative_path, 0), storage_info.offset + storage_info.length
        )
    for name, size in sorted(needed.items()):
        file_size = size_of(name)
        if file_size is None:
            raise DamagedError.of(directory, f"{name} is missing")
        if file_size < size:
            raise DamagedError.of(directory, f"{name} has {file_size} of {size} bytes")
    return metadata


def _check_format(directory: Path) -> None:
    if not directory.is_dir():
        raise UserError(f"checkpoint {directory} does not exist; give a directory that was saved")
    file = directory / CONFIG_FNAME
    if not file.exists() and (directory / "config.json").is_file():
        raise UserError(
            f"{directory} is a Hugging Face model: give it as checkpoint.pretrained_checkpoint"
        )
    if not file.exists():
        raise UserError(
            f"{directory} is not a checkpoint: {file.name} is missing; give a directory that was saved"
        )
    try:
        values = strict_json.loads(file.read_bytes())
        stored_format = values[
            "sharded_backend"
        ]  # earlier versions of Megatron-Core write the common state's, too
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DamagedError.of(
            directory, f"{file.name} cannot be read ({_short_reason(error)})"
        ) from error
    if stored_format != FORMAT.sharded_backend:
        raise UserError(
            f"checkpoint {directory} has the format {stored_format!r}; only {FORMAT.sharded_backend!r} can be loaded"
        )


def _read_metadata(directory: Path) -> Metadata:
    try:
        with (directory / ".metadata").open("rb") as stream:
            metadata = unpickling.read_metadata(stream, f"{directory}/.metadata")
    except FileNotFoundError:
        raise DamagedError.of(directory, ".metadata is missing") from None
    except UserError:
        raise
    except Exception as error:  # a damaged pickle raises nearly anything
        raise DamagedError.of(
            directory, f".metadata cannot be read ({_short_reason(error)})"
        ) from error
    if not isinstance(metadata, Metadata) or not metadata.storage_data:
        raise DamagedError.of(directory, ".metadata is of something else")
    return metadata


def stored_keys(metadata: Metadata) -> StoredShapes:
    """The keys that a checkpoint holds, without Megatron's own record of common state."""
    keys: StoredShapes = {}
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            keys[name] = tuple(entry.size)
        elif (key := ShardedObject.empty_from_unique_key(name).key) != COMMON_STATE:
            keys[key] = None
    return keys


def wanted_keys(state: dict[str, Any]) -> dict[str, ShardedTensor | ShardedObject]:
    """The keys that all ranks together load, with their descriptions without data."""
    expanded, _, _ = load_preprocess(state)
    sharded, _ = extract_sharded_base(expanded)
    local_entries = {entry.key: entry.without_data() for entry in nested_values(sharded)}
    return united(local_entries)


def united[T](local_entries: dict[str, T]) -> dict[str, T]:
    """The entries of all ranks: the first rank that has a key sends its entry, all others only a hash of the key."""
    keys = {digest(key): key for key in local_entries}
    everyone = distributed.all_gather_object(np.array(list(keys), dtype=np.int64))
    unique_digests, places = np.unique(np.concatenate(everyone), return_index=True)
    start = sum(len(part) for part in everyone[: distributed.rank()])
    sent = [
        keys[digest_value]
        for digest_value, position in zip(unique_digests.tolist(), places, strict=True)
        if 0 <= position - start < len(keys)
    ]
    parts = distributed.all_gather_object({key: local_entries[key] for key in sent})
    return {key: entry for part in parts for key, entry in part.items()}


def compare(
    requested: dict[str, ShardedTensor | ShardedObject],
    stored: StoredShapes,
    known: tuple[str, ...],
) -> StateMismatch:
    """The names and shapes that do not match; ``known`` are prefixes of names that may be unused."""
    missing = sorted(key for key in requested if key not in stored)
    left_over = sorted(
        key
        for key in stored
        if key not in requested and not _is_extra_state(key) and not key.startswith(known)
    )
    shapes = []
    for key, entry in requested.items():
        if (
            isinstance(entry, ShardedTensor)
            and key in stored
            and not _fits_stored_shape(entry, stored[key])
        ):
            shapes.append(
                f"{key} is {_shape_text(stored[key])}, the model's is {_shape_text(entry.global_shape)}"
            )
    return StateMismatch(tuple(missing), tuple(left_over), tuple(sorted(shapes)))


def _fits_stored_shape(entry: ShardedTensor, stored: tuple[int, ...] | None) -> bool:
    if stored is None:
        return False
    # The vocabulary's padding depends on the layout: only the first dimension of such tensors may differ.
    skipped = 1 if entry.allow_shape_mismatch else 0
    return tuple(entry.global_shape)[skipped:] == stored[skipped:]


def _shape_text(shape: Iterable[int] | None) -> str:
    return "an object" if shape is None else "x".join(map(str, shape))


def _is_extra_state(key: str) -> bool:
    return "_extra_state" in key


def _drop_extra_state(state: dict[str, Any], stored: StoredShapes) -> None:
    """Do not load Transformer Engine's extra state from a checkpoint that was saved without it."""
    for name, value in list(state.items()):
        if isinstance(value, dict):
            _drop_extra_state(value, stored)
        elif (
            isinstance(value, ShardedObject)
            and _is_extra_state(value.key)
            and value.key not in stored
        ):
            del state[name]


def _short_reason(error: BaseException) -> str:
    """The first line of an error message, shortened for verbose errors of torch."""
    if isinstance(error, pickle.UnpicklingError):
        return "it is not a tensor"
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__


def unreadable(error: BaseException, directory: Path) -> BaseException:
    """A failed load as a ``DamagedError``, unless it is a programming error."""
    cause = root_cause(error)
    if isinstance(cause, (UserError, AssertionError)) or not isinstance(
        error, (Exception, CheckpointException)
    ):
        return cause
    return DamagedError.of(directory, f"its content cannot be read ({_short_reason(cause)})")
