# SPDX-License-Identifier: Apache-2.0
"""Save a sharded state dict in Megatron-Core's ``torch_dist`` format, atomically.

Megatron-Core's planner decides what is written, and torch's writer writes it. Megatron-Core's own writer spawns a
manager process that imports the main module again (1.4 to 9.6 s), and hides a full disk behind an assertion.
"""

import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from megatron.core.dist_checkpointing.core import save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)

from megatron.bridge.checkpoint import bucket, manifest, paths
from megatron.bridge.checkpoint.async_writer import AsyncSaver
from megatron.bridge.checkpoint.collective import (
    forget_frames,
    naming_node,
    on_every_rank,
    on_first_rank,
    out_of_space,
    root_cause,
)
from megatron.bridge.checkpoint.hashing_writer import (
    PreparedSave,
    WrittenFiles,
    collective_steps,
    prepare_save,
)
from megatron.bridge.checkpoint.host_buffers import copy_size
from megatron.bridge.checkpoint.loading import COMMON_STATE, FORMAT, without_torch_warnings
from megatron.bridge.checkpoint.replicas import distribute_replicas
from megatron.bridge.utils import atomic, distributed, storage
from megatron.bridge.utils.errors import UserError
from megatron.bridge.utils.storage_paths import url_of

ExtraFiles = Callable[[Path], None]


def save(
    state: dict[str, Any],
    directory: Path,
    write_extra: ExtraFiles | None = None,
    overwrite: bool = False,
    published: Callable[[], None] = lambda: None,
    background: AsyncSaver | None = None,
    planner: MCoreSavePlanner | None = None,
) -> None:
    """Write ``state`` to a staging directory on all ranks, then publish it as ``directory`` with a manifest.

    Args:
        state: Megatron's sharded state dict; entries that are not sharded are stored once, from rank 0.
        directory: The directory to appear; its file system must be shared by all ranks.
        write_extra: Writes further files into the staging directory, on rank 0.
        overwrite: Replace a directory that exists.
        published: Called on rank 0 after the directory has appeared.
        background: Where to write while the caller goes on; publishing is then done by its ``poll``.
        planner: Gives the numbers of a state that is not in memory.

    Raises:
        UserError: the directory exists, cannot be written, or the disk is full; nothing is left behind.
    """
    attempt = _SaveAttempt(directory, write_extra, overwrite, published)
    attempt.run(lambda: attempt.prepare(state, planner))
    if background is None:
        attempt.run(lambda: attempt.finish(attempt.prepared.write_files))
    else:
        background.start(
            attempt.prepared, lambda outcome: attempt.run(lambda: attempt.finish(outcome))
        )


def host_buffer_size(state: dict[str, Any]) -> int:
    """The size of a copy of what this rank writes of ``state``; all ranks must call this."""
    sharded, _ = _distribute_replicas(state)
    return sum(
        copy_size(entry.data)
        for entry in nested_values(sharded)
        if isinstance(entry, ShardedTensor)
        and is_main_replica(entry.replica_id)
        and entry.data is not None
    )


class _SaveAttempt:
    """One save, from its staging directory to the published one."""

    prepared: PreparedSave

    def __init__(
        self,
        directory: Path,
        write_extra: ExtraFiles | None,
        overwrite: bool,
        published: Callable[[], None],
    ) -> None:
        self._directory = directory
        self._write_extra = write_extra
        self._overwrite = overwrite
        self._published = published
        self._in_bucket = url_of(directory) is not None
        # A name of its own: a process of an earlier attempt that still lives cannot write into this one.
        token = on_first_rank(lambda: uuid.uuid4().hex[:8])
        self._staging = atomic.staging_path(directory.with_name(f"{directory.name}.{token}"))

    def run(self, step: Callable[[], None]) -> None:
        """Run a step of the save; an error on one rank ends it on all ranks and removes what was written."""
        try:
            step()
        except BaseException as error:
            forget_frames(error)
            # No collective here: an error that only this rank saw must not make it wait for the others.
            if distributed.rank() == 0 or (self._in_bucket and distributed.local_rank() == 0):
                shutil.rmtree(self._staging, ignore_errors=True)
            raise save_error(error, self._directory) from error

    def prepare(self, state: dict[str, Any], planner: MCoreSavePlanner | None) -> None:
        """Create the staging directory and agree on who writes what."""
        on_first_rank(self._create)
        if self._in_bucket:
            on_every_rank(
                lambda: self._staging.mkdir(parents=True, exist_ok=True)
            )  # on each machine
        save_id = on_first_rank(manifest.new_save_id)
        with without_torch_warnings():
            self.prepared = prepare_save(
                torch_state(state), self._staging, planner or save_planner(), save_id
            )

    def finish(self, outcome: Callable[[], WrittenFiles]) -> None:
        """Publish what all ranks have written; ``outcome`` returns what this rank has written."""
        with without_torch_warnings():
            collective_steps().all_reduce("write", lambda: naming_node(outcome), self._publish)
        if self._in_bucket and distributed.local_rank() == 0 and self._staging.is_dir():
            bucket.keep(self._staging)  # on other machines than the first rank's

    def _create(self) -> None:
        if not self._overwrite:
            atomic.refuse_existing(self._directory)
        if self._in_bucket and not self._overwrite and storage.listing(self._directory):
            raise UserError(
                f"output directory {self._directory} exists: remove it or choose another one"
            )
        if self._in_bucket:
            bucket.begin(self._directory)
        atomic.create_staging(
            self._staging.with_name(self._staging.name.removesuffix(atomic.STAGING_SUFFIX))
        )

    def _publish(self, written: list[WrittenFiles]) -> None:
        records = self.prepared.finish(written)
        if self._write_extra is not None:
            self._write_extra(self._staging)
        save_config(FORMAT, str(self._staging))
        iteration = paths.iteration_of(self._directory)
        saved = manifest.write(self._staging, iteration, self.prepared.writer.save_id, records)
        if self._in_bucket:
            small = [name for name in saved.files if bucket.is_small(name)]
            storage.push(self._staging, [*small, manifest.NAME], self._directory)
            bucket.publish(
                self._directory, {name: record.size for name, record in saved.files.items()}
            )
            bucket.keep(self._staging)
        else:
            atomic.publish(self._staging, self._directory)
        self._published()


def save_planner() -> MCoreSavePlanner:
    return MCoreSavePlanner(
        dedup_replicated_tensors=False, flatten_state_dict=False, flatten_sharded_tensors=False
    )


def torch_state(state: dict[str, Any]) -> dict[str, Any]:
    """What this rank writes of Megatron's state dict, in the form of torch's writer; the common state is one object."""
    sharded, common = _distribute_replicas(state)
    sharded[COMMON_STATE] = ShardedObject(
        COMMON_STATE, common, (1,), (0,), replica_id=distributed.rank()
    )
    flat, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, keep_only_main_replica=True)
    return mcore_to_pyt_state_dict(flat)


def _distribute_replicas(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The sharded part of a state, and the rest; the first rank checks the plan, so no rank checks all shards here."""
    preprocessed = cast(Any, save_preprocess(state, validate_access_integrity=False))
    sharded, common = cast(tuple[dict[str, Any], dict[str, Any]], preprocessed)
    if distributed.world_size() > 1:
        distribute_replicas(sharded)
    return sharded, common


def save_error(error: BaseException, directory: Path) -> BaseException:
    """A failed save as a ``UserError`` if the user can fix it, else the error itself."""
    cause = root_cause(error)
    if isinstance(cause, OSError):
        way_out = (
            "free some space or choose another disk"
            if out_of_space(cause)
            else "choose a folder that can be"
        )
        return UserError(f"{directory} cannot be written: {cause.strerror or cause}; {way_out}")
    return cause
