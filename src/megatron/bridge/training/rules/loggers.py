# SPDX-License-Identifier: Apache-2.0
"""Rules on where the numbers of a run go."""

from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.utils.optional import installed, missing

TRACKERS = {
    "wandb_project": ("wandb", ("wandb_entity", "wandb_exp_name", "wandb_save_dir")),
    "mlflow_experiment": ("mlflow", ("mlflow_run_name", "mlflow_tracking_uri")),
}


def trackers_can_be(config: ConfigContainer, world_size: int) -> str | None:
    """A tracker needs its package, and its options need it."""
    logger = config.logger
    for key, (package, options) in TRACKERS.items():
        chosen = getattr(logger, key)
        if chosen is not None and not installed(package):
            return missing(package, f"logger.{key}={chosen}", package)
        for option in options:
            if chosen is None and (value := getattr(logger, option)) is not None:
                return f"logger.{option}={value} has no effect without logger.{key}: set that, too, or remove it"
    return None
