# SPDX-License-Identifier: Apache-2.0
"""Checkpoints between the persistent ones, cheaper and less safe: one is kept, and used only if it surely fits.

Such a checkpoint names the run that it is of (by a name that lies in ``checkpoint.save``: whoever empties that
folder starts anew) and the persistent checkpoint that it came after (whoever goes back to an older one goes back).
"""

import socket
import uuid
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron.bridge.checkpoint import layout, local, saving
from megatron.bridge.checkpoint.collective import forget_frames, on_every_rank, on_first_rank
from megatron.bridge.checkpoint.manifest import DamagedError, Mode
from megatron.bridge.training.config import CheckpointConfig
from megatron.bridge.training.parallel_layout import Layout
from megatron.bridge.utils import atomic, dist
from megatron.bridge.utils.console import console

NAME = "run_id"
DEFAULT_GLOBAL = "non_persistent"


@dataclass(frozen=True)
class Kept:
    """A rank's part of a non-persistent checkpoint that is whole on every rank."""

    store: local.Store
    iteration: int

    @property
    def place(self) -> Path:
        """Its name in messages."""
        return self.store.place(self.iteration)


def origin(root: Path, started: int | None) -> dict[str, Any]:
    """What a non-persistent checkpoint notes of itself; for the first rank, or for all.

    Args:
        root: The folder ``checkpoint.save``.
        started: The persistent checkpoint that was last begun to be written.
    """
    try:
        published = layout.latest_iteration(root)
    except DamagedError:
        published = None
    after = {number for number in (published, started) if number is not None}
    return {"after": sorted(after), "layout": asdict(Layout.current()), "rank": dist.rank()}


def run_name(root: Path, make: bool = False) -> str | None:
    """The name of the run in ``root``; None if it has none and none shall be made."""
    file = root / NAME
    if file.is_file():
        return file.read_text().strip()
    if make:
        atomic.write_text(file, uuid.uuid4().hex + "\n")
        return run_name(root)
    return None


def store(config: CheckpointConfig, name: str) -> local.Store:
    """Where this rank keeps its parts."""
    if config.non_persistent_ckpt_type == "in_memory":
        return local.InMemory.of(name)
    assert config.non_persistent_local_ckpt_dir is not None, "non_persistent_local_ckpt_dir is not set"
    return local.OnDisk(Path(config.non_persistent_local_ckpt_dir) / name / f"rank_{dist.rank():05d}")


def global_root(config: CheckpointConfig, name: str) -> Path:
    """Where non-persistent checkpoints of all ranks together lie."""
    assert config.save is not None, "checkpoint.save is not set"
    return Path(config.non_persistent_global_ckpt_dir or Path(config.save) / DEFAULT_GLOBAL) / name


def newest(config: CheckpointConfig, own: tuple[Path, ...]) -> Path | Kept | None:
    """The non-persistent checkpoint to go on from instead of the first one of ``own``; asked on all ranks.

    Returns:
        A directory, or a part of each rank, that is newer; None if there is none that fits. What there is but
        cannot be used is said.
    """
    kind = config.non_persistent_ckpt_type
    if kind is None or config.save is None:
        return None
    root = Path(config.save)
    name = on_first_rank(lambda: run_name(root))
    if name is None:
        return None
    head = layout.iteration_of(own[0]) if own else None
    if kind == "global":
        return on_first_rank(lambda: _newest_directory(global_root(config, name), root, head))
    return _newest_of_ranks(store(config, name), root, head, config.verify)


def _newest_directory(folder: Path, root: Path, head: int | None) -> Path | None:
    for number in reversed(layout.published_iterations(folder)):
        directory = layout.iteration_dir(folder, number)
        if head is not None and number <= head:
            return None
        reason = _unfit(lambda: local.read_origin(directory), root, head)  # noqa: B023 - called at once
        if reason is None:
            return directory
        _tell(directory, reason)
    return None


def _newest_of_ranks(mine: local.Store, root: Path, head: int | None, mode: Mode) -> Kept | None:
    newer = [number for number in mine.iterations() if head is None or number > head]
    found = {number: _unfit_part(mine, number, root, head) for number in newer}
    everywhere = dist.all_gather_object((socket.gethostname(), found))
    for number in sorted({number for _, parts in everywhere for number in parts}, reverse=True):
        reasons = [
            f"rank {rank} on {host} {parts.get(number, 'has no part of it')}"
            for rank, (host, parts) in enumerate(everywhere)
            if parts.get(number, "missing")
        ]
        reasons = reasons or _damage(mine, number, mode)
        if not reasons:
            return Kept(mine, number)
        more = f", and so with {len(reasons) - 1} more" if len(reasons) > 1 else ""
        _tell(mine.place(number), reasons[0] + more)
    return None


def _unfit_part(mine: local.Store, number: int, root: Path, head: int | None) -> str | None:
    """Why this rank cannot use its part, to be said behind the rank's name."""

    def read() -> dict[str, Any]:
        found = mine.origin(number)
        if (found["layout"], found["rank"]) != (asdict(Layout.current()), dist.rank()):
            raise DamagedError("it was made under another layout")
        return found

    reason = _unfit(read, root, head)
    return reason and f"cannot use it: {reason}"


def _unfit(read: Any, root: Path, head: int | None) -> str | None:
    """Why a non-persistent checkpoint does not come after the persistent one that the run would go on from."""
    try:
        after = read()["after"]
    except DamagedError as error:
        return str(error)
    before = max((number for number in after if layout.iteration_dir(root, number).is_dir()), default=None)
    if before == head:
        return None
    return f"it came after iteration {before or 'none'}, and the run goes on from {head or 'none'}"


def _damage(mine: local.Store, number: int, mode: Mode) -> list[str]:
    def look() -> str | None:
        try:
            mine.verify(number, mode)
        except DamagedError as error:
            return f"rank {dist.rank()} on {socket.gethostname()} cannot use it: {error}"
        return None

    return [reason for reason in dist.all_gather_object(on_every_rank(look)) if reason is not None]


def _tell(place: Path, reason: str) -> None:
    console().print(f"non-persistent checkpoint {place} is not used: {reason}", markup=False)


def save_part(kept: local.Store, step: int, state: dict[str, Any], noted: dict[str, Any]) -> None:
    """Keep what ``state`` describes, on all ranks, then forget the part before.

    Raises:
        UserError: a rank's disk cannot be written.
    """
    try:
        on_every_rank(lambda: kept.save(step, local.values(state), noted))
    except BaseException as error:
        forget_frames(error)
        raise saving.unwritable(error, kept.place(step)) from error
    kept.keep_only(step)


def remove_global(folder: Path, but: Iterable[int] = ()) -> None:
    """Delete the non-persistent directories in ``folder`` other than ``but``; for the first rank."""
    for number in layout.published_iterations(folder):
        if number not in but:
            layout.remove(folder, number)
