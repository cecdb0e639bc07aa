# SPDX-License-Identifier: Apache-2.0
"""Rules on where the numbers of a run go."""

from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.utils.optional import installed, missing

TRACKERS = {
    "wandb_project": ("wandb", ("wandb_entity", "wandb_exp_name", "wandb_save_dir")),
    "mlflow_experiment": ("mlflow", ("mlflow_run_name", "mlflow_tracking_uri")),
}


def tracker_options_have_a_tracker(config: ConfigContainer, world_size: int) -> str | None:
    """Options of a tracker need the tracker."""
    logger = config.logger
    for key, (_, options) in TRACKERS.items():
        for option in options:
            if getattr(logger, key) is None and (value := getattr(logger, option)) is not None:
                return f"logger.{option}={value} has no effect without logger.{key}: set that, too, or remove it"
    return None


def trackers_are_installed(config: ConfigContainer, world_size: int) -> str | None:
    """A tracker needs its package."""
    for key, (package, _) in TRACKERS.items():
        chosen = getattr(config.logger, key)
        if chosen is not None and not installed(package):
            return missing(package, f"logger.{key}={chosen}", package)
    return None
