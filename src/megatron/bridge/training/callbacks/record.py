# SPDX-License-Identifier: Apache-2.0
"""What a run leaves in its folder beside checkpoints."""

from pathlib import Path

from megatron.bridge.checkpoint.collective import on_first_rank
from megatron.bridge.training.callbacks.base import Callback
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.state import Run
from megatron.bridge.utils.atomic import write_text
from megatron.bridge.utils.config import origins
from megatron.bridge.utils.errors import UserError


class RunRecord(Callback):
    """Writes the resolved config, with the origin of each value, to ``run_config.yaml``."""

    def __init__(self, config: ConfigContainer) -> None:
        self._folder = Path(config.logger.log_dir) if config.logger.log_dir else None

    def on_train_start(self, context: Run) -> None:
        """Write it, on the first rank; if that fails, all ranks stop."""
        folder = self._folder
        if folder is not None:
            on_first_rank(lambda: _write(folder, origins.annotated_yaml(context.config)))


def _write(folder: Path, text: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / "run_config.yaml", text)
    except OSError as error:
        raise UserError(f"logger.log_dir={folder} cannot be written: {error.strerror}; choose another") from error
