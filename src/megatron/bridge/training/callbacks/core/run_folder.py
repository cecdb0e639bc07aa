# SPDX-License-Identifier: Apache-2.0
"""The folder of a run: its lock, and how the run was started."""

import json
from pathlib import Path
from typing import Any

from megatron.bridge.checkpoint import bucket, lock
from megatron.bridge.checkpoint.collective import on_first_rank
from megatron.bridge.training.callbacks.base import Callback
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.state import Run
from megatron.bridge.utils import distributed
from megatron.bridge.utils.atomic import refuse_unwritable, write_text
from megatron.bridge.utils.config.origins import Origins, annotated_yaml
from megatron.bridge.utils.console import print_rank_0
from megatron.bridge.utils.environment import environment, git_diff, summary
from megatron.bridge.utils.storage import StorageError


class RunLock(Callback):
    """Locks ``checkpoint.save`` against other runs while this run writes there.

    The callback comes before all callbacks that write to the folder, so it is closed after them.
    """

    def on_train_start(self, context: Run) -> None:
        """Refuse a folder that cannot be written or belongs to another run now, not after hours."""
        save = context.config.checkpoint.save
        if save is not None:
            on_first_rank(lambda: _lock_folder(Path(save)))

    def close(self, context: Run) -> None:
        save = context.config.checkpoint.save
        if save is not None and distributed.rank() == 0:
            try:
                bucket.push_beside(Path(save))
            except StorageError as error:  # the run may be ending because of it
                print_rank_0(f"not uploaded: {error}")
            lock.release(Path(save))


def _lock_folder(root: Path) -> None:
    probe = root / ".writable"
    with refuse_unwritable(f"checkpoint.save={root}"):
        root.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    lock.acquire(root)


CONFIG, ENVIRONMENT, DIFF = "run_config.yaml", "environment.json", "git.diff"
STARTS = "starts"


class RunMetadata(Callback):
    """Writes the resolved config, the versions of packages and the state of the source tree to ``logger.log_dir``.

    ``run_config.yaml`` holds the config with the origin of each value, under a summary of the environment. Each start,
    also a resume, keeps its own copy with ``environment.json`` and ``git.diff`` in ``starts/001`` and so on.
    """

    def on_train_start(self, context: Run) -> None:
        config = context.config
        folder = context.config.logger.log_dir
        if config.logger.log_non_default_values:
            config.log_non_default_values(context.origins)
        if folder:
            on_first_rank(
                lambda: write_run_metadata(
                    Path(folder), config, context.origins, context.progress.step
                )
            )


def write_run_metadata(folder: Path, config: ConfigContainer, origins: Origins, step: int) -> None:
    """Write the metadata of one start, at ``step``, into the log ``folder`` of the run."""
    metadata: dict[str, Any] = environment() | {"step": step}
    with refuse_unwritable(f"logger.log_dir={folder}"):
        start = _next_start(folder)
        header = [*summary(metadata), f"more in {STARTS}/{start.name}"]
        text = "".join(f"# {line}\n" for line in header) + annotated_yaml(config, origins)
        (start / CONFIG).write_text(text)
        (start / ENVIRONMENT).write_text(json.dumps(metadata, indent=2) + "\n")
        if diff := git_diff(metadata["git"]):
            (start / DIFF).write_text(diff)
        write_text(folder / CONFIG, text)


def _next_start(folder: Path) -> Path:
    starts = folder / STARTS
    starts.mkdir(parents=True, exist_ok=True)
    numbers = [int(entry.name) for entry in starts.iterdir() if entry.name.isdecimal()]
    start = starts / f"{max(numbers, default=0) + 1:03d}"
    start.mkdir()
    return start
