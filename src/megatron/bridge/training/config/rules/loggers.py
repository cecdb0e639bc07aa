# SPDX-License-Identifier: Apache-2.0
"""Rules on loggers and trackers."""

from collections.abc import Iterator

from megatron.bridge.training.config.run_config import RunConfig
from megatron.bridge.utils.optional_imports import installed, missing_message

TRACKERS = {"wandb_project": "wandb", "mlflow_experiment": "mlflow"}


def trackers_are_installed(config: RunConfig, world_size: int) -> Iterator[str]:
    """The package of a tracker is installed."""
    for key, package in TRACKERS.items():
        chosen = getattr(config.logger, key)
        if chosen is not None and not installed(package):
            yield missing_message(package, f"logger.{key}={chosen}", package)
