# SPDX-License-Identifier: Apache-2.0
"""Non-persistent checkpoints: cheaper and less safe ones between the persistent checkpoints. Only one is kept.

A non-persistent checkpoint stores the id of its run, which is a file in ``checkpoint.save`` (an emptied folder is
a new run), and the persistent checkpoint that it follows (it is not used after going back to an older one).
"""

import socket
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.bridge.checkpoint import paths, rank_local, saving
from megatron.bridge.checkpoint.collective import forget_frames, on_every_rank, on_first_rank
from megatron.bridge.checkpoint.manifest import DamagedError, VerifyMode
from megatron.bridge.training.config import CheckpointConfig
from megatron.bridge.training.initialize.rank_state import current_sizes
from megatron.bridge.utils import atomic, distributed
from megatron.bridge.utils.console import print_rank_0
from megatron.bridge.utils.errors import first_few

RUN_ID_FILE = "run_id"
DEFAULT_GLOBAL = "non_persistent"


@dataclass(frozen=True)
class LocalCheckpoint:
    """This rank's part of a non-persistent checkpoint that is complete on every rank."""

    store: rank_local.RankLocalStore
    iteration: int

    @property
    def place(self) -> Path:
        """The location to show in messages."""
        return self.store.place(self.iteration)


def origin(root: Path, started: int | None) -> dict[str, Any]:
    """The metadata of a non-persistent checkpoint of the run in ``root``.

    ``started`` is the last persistent checkpoint whose save has started.
    """
    try:
        published = paths.latest_iteration(root)
    except DamagedError:
        published = None
    after = {iteration for iteration in (published, started) if iteration is not None}
    return {"after": sorted(after), "layout": current_sizes(), "rank": distributed.rank()}


def run_name(root: Path, make: bool = False) -> str | None:
    """The id of the run in ``root``; without one, None, or a new id with ``make``."""
    file = root / RUN_ID_FILE
    if file.is_file():
        return file.read_text().strip()
    if make:
        atomic.write_text(file, uuid.uuid4().hex + "\n")
        return run_name(root)
    return None


def store(config: CheckpointConfig, name: str) -> rank_local.RankLocalStore:
    if config.non_persistent_ckpt_type == "in_memory":
        return rank_local.MemoryStore.of(name)
    assert config.non_persistent_local_ckpt_dir is not None, (
        "non_persistent_local_ckpt_dir is not set"
    )
    return rank_local.DiskStore(
        Path(config.non_persistent_local_ckpt_dir) / name / f"rank_{distributed.rank():05d}"
    )


def global_root(config: CheckpointConfig, name: str) -> Path:
    """The folder of non-persistent checkpoints that all ranks write together."""
    assert config.save is not None, "checkpoint.save is not set"
    return Path(config.non_persistent_global_ckpt_dir or Path(config.save) / DEFAULT_GLOBAL) / name


def newest_usable(
    config: CheckpointConfig, persistent: tuple[Path, ...]
) -> Path | LocalCheckpoint | None:
    """The non-persistent checkpoint to resume from instead of ``own[0]``; to be called on all ranks.

    Prints why newer ones cannot be used.

    Returns:
        A newer directory, or this rank's part of a newer checkpoint; None if there is none that can be used.
    """
    kind = config.non_persistent_ckpt_type
    if kind is None or config.save is None:
        return None
    root = Path(config.save)
    name = on_first_rank(lambda: run_name(root))
    if name is None:
        return None
    head = paths.iteration_of(persistent[0]) if persistent else None
    if kind == "global":
        return on_first_rank(lambda: _newest_directory(global_root(config, name), root, head))
    return _newest_of_ranks(store(config, name), root, head, config.verify)


def _newest_directory(folder: Path, root: Path, head: int | None) -> Path | None:
    for iteration in reversed(paths.published_iterations(folder)):
        directory = paths.iteration_dir(folder, iteration)
        if head is not None and iteration <= head:
            return None
        reason = _unusable(lambda: rank_local.read_origin(directory), root, head)  # noqa: B023 - called at once
        if reason is None:
            return directory
        _print_unused(directory, reason)
    return None


def _newest_of_ranks(
    own_store: rank_local.RankLocalStore, root: Path, head: int | None, mode: VerifyMode
) -> LocalCheckpoint | None:
    newer = [iteration for iteration in own_store.iterations() if head is None or iteration > head]
    reasons_here = {
        iteration: _unusable_local(own_store, iteration, root, head) for iteration in newer
    }
    everywhere = distributed.all_gather_object((socket.gethostname(), reasons_here))
    for iteration in sorted(
        {iteration for _, parts in everywhere for iteration in parts}, reverse=True
    ):
        reasons = [
            f"rank {rank} on {host} {parts.get(iteration, 'has no part of it')}"
            for rank, (host, parts) in enumerate(everywhere)
            if parts.get(iteration, "missing")
        ]
        reasons = reasons or _damaged_ranks(own_store, iteration, mode)
        if not reasons:
            return LocalCheckpoint(own_store, iteration)
        _print_unused(own_store.place(iteration), first_few(reasons, 1))
    return None


def _unusable_local(
    own_store: rank_local.RankLocalStore, iteration: int, root: Path, head: int | None
) -> str | None:
    """Why this rank cannot use its part, to follow the rank's name in a message; None if it can."""

    def read() -> dict[str, Any]:
        origin_of_part = own_store.origin(iteration)
        if (origin_of_part["layout"], origin_of_part["rank"]) != (
            current_sizes(),
            distributed.rank(),
        ):
            raise DamagedError("it was saved with other parallel sizes")
        return origin_of_part

    reason = _unusable(read, root, head)
    return reason and f"cannot use it: {reason}"


def _unusable(read: Any, root: Path, head: int | None) -> str | None:
    """Why a non-persistent checkpoint does not follow the persistent one from which the run would resume."""
    try:
        after = read()["after"]
    except DamagedError as error:
        return str(error)
    before = max(
        (iteration for iteration in after if paths.iteration_dir(root, iteration).is_dir()),
        default=None,
    )
    if before == head:
        return None
    return f"it follows iteration {before or 'none'}, but the run resumes from {head or 'none'}"


def _damaged_ranks(
    own_store: rank_local.RankLocalStore, iteration: int, mode: VerifyMode
) -> list[str]:
    def check() -> str | None:
        try:
            own_store.verify(iteration, mode)
        except DamagedError as error:
            return f"rank {distributed.rank()} on {socket.gethostname()} cannot use it: {error}"
        return None

    return [
        reason
        for reason in distributed.all_gather_object(on_every_rank(check))
        if reason is not None
    ]


def _print_unused(directory: Path, reason: str) -> None:
    print_rank_0(f"non-persistent checkpoint {directory} is not used: {reason}")


def save_local(
    own_store: rank_local.RankLocalStore, step: int, state: dict[str, Any], noted: dict[str, Any]
) -> None:
    """Save ``state`` on all ranks, then remove the previous part."""
    try:
        on_every_rank(lambda: own_store.save(step, rank_local.state_values(state), noted))
    except BaseException as error:
        forget_frames(error)
        raise saving.save_error(error, own_store.place(step)) from error
    own_store.keep_only(step)


def remove_global(folder: Path, but: Iterable[int] = ()) -> None:
    """Delete the non-persistent directories in ``folder`` except ``but``; to be called on the first rank."""
    for iteration in paths.published_iterations(folder):
        if iteration not in but:
            paths.remove(folder, iteration)
