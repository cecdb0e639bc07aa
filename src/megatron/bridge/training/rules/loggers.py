# SPDX-License-Identifier: Apache-2.0
"""Rules on where the numbers of a run go."""

from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.utils.optional import installed, missing

TRACKERS = {"wandb_project": "wandb", "mlflow_experiment": "mlflow"}


def trackers_are_installed(config: ConfigContainer, world_size: int) -> str | None:
    """A tracker needs its package."""
    for key, package in TRACKERS.items():
        chosen = getattr(config.logger, key)
        if chosen is not None and not installed(package):
            return missing(package, f"logger.{key}={chosen}", package)
    return None
