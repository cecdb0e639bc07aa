# SPDX-License-Identifier: Apache-2.0
"""What a run leaves in its folder beside checkpoints."""

import json
from pathlib import Path
from typing import Any

from megatron.bridge.checkpoint.collective import on_first_rank
from megatron.bridge.training.callbacks.base import Callback
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.state import Run
from megatron.bridge.utils.atomic import write_text
from megatron.bridge.utils.config import origins
from megatron.bridge.utils.environment import environment, git_diff, summary
from megatron.bridge.utils.errors import UserError

CONFIG, ENVIRONMENT, DIFF = "run_config.yaml", "environment.json", "git.diff"
STARTS = "starts"


class RunRecord(Callback):
    """Writes how the run was started: its resolved config, versions of programs, and the state of the sources.

    ``run_config.yaml`` is the config with the origin of each value, below a few lines on the rest. Each start,
    resumed ones too, keeps its own beside ``environment.json`` and ``git.diff``, in ``starts/001`` and so on.
    """

    def __init__(self, config: ConfigContainer) -> None:
        self._folder = Path(config.logger.log_dir) if config.logger.log_dir else None

    def on_train_start(self, context: Run) -> None:
        """Write it, on the first rank; if that fails, all ranks stop."""
        if context.config.logger.log_non_default_values:
            context.config.log_non_default_values()
        folder = self._folder
        if folder is not None:
            on_first_rank(lambda: write(folder, context.config, context.progress.step))


def write(folder: Path, config: ConfigContainer, step: int) -> None:
    """Write the record of a start.

    Args:
        folder: Of the run.
        config: What it runs.
        step: After which it goes on.

    Raises:
        UserError: the folder cannot be written.
    """
    found = environment() | {"step": step}
    try:
        start = _next_start(folder)
        text = _commented([*summary(found), f"more in {STARTS}/{start.name}"]) + origins.annotated_yaml(config)
        _write_start(start, found, text)
        write_text(folder / CONFIG, text)
    except OSError as error:
        raise UserError(f"logger.log_dir={folder} cannot be written: {error.strerror}; choose another") from error


def _next_start(folder: Path) -> Path:
    starts = folder / STARTS
    starts.mkdir(parents=True, exist_ok=True)
    numbers = [int(entry.name) for entry in starts.iterdir() if entry.name.isdecimal()]
    start = starts / f"{max(numbers, default=0) + 1:03d}"
    start.mkdir()
    return start


def _write_start(start: Path, found: dict[str, Any], text: str) -> None:
    (start / CONFIG).write_text(text)
    (start / ENVIRONMENT).write_text(json.dumps(found, indent=2) + "\n")
    if diff := git_diff(found["git"]):
        (start / DIFF).write_text(diff)


def _commented(lines: list[str]) -> str:
    return "".join(f"# {line}\n" for line in lines)
