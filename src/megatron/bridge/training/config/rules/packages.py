# SPDX-License-Identifier: Apache-2.0
"""The rule on optional packages."""

from collections.abc import Iterator

from megatron.bridge.training.config.rules.lookup import value_of
from megatron.bridge.training.config.run_config import RunConfig
from megatron.bridge.utils.optional_imports import installed, missing_message

PACKAGES = {
    "logger.wandb_project": ("wandb", "wandb"),
    "logger.mlflow_experiment": ("mlflow", "mlflow"),
    "logger.prometheus_port": ("prometheus_client", "prometheus"),
    "checkpoint.async_strategy": ("nvidia_resiliency_ext", "resiliency"),
}
"""Setting -> the package that it needs if it is not the default, and the extra that installs the package."""


def packages_are_installed(config: RunConfig, world_size: int) -> Iterator[str]:
    """The packages that trackers and background saves need are installed."""
    for key, (package, extra) in PACKAGES.items():
        value = value_of(config, key)
        if value not in (None, "thread") and not installed(package):
            yield missing_message(package, f"{key}={value}", extra)
