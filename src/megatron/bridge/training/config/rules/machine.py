# SPDX-License-Identifier: Apache-2.0
"""Rules on what this machine must have: packages and GPUs."""

from collections.abc import Iterator

from megatron.bridge.backends.cpu.device import has_cuda
from megatron.bridge.training.config.rules.performance import TOOLS
from megatron.bridge.training.config.rules.values import value_of
from megatron.bridge.training.config.run_config import RunConfig
from megatron.bridge.utils.optional_imports import installed, missing_message

PACKAGES = {
    "logger.wandb_project": ("wandb", "wandb"),
    "logger.mlflow_experiment": ("mlflow", "mlflow"),
    "logger.comet_project": ("comet_ml", "comet"),
    "logger.swanlab_project": ("swanlab", "swanlab"),
    "logger.prometheus_port": ("prometheus_client", "prometheus"),
    "logger.otel_service_name": ("opentelemetry", "otel"),
    "checkpoint.async_strategy": ("nvidia_resiliency_ext", "resiliency"),
}
"""Setting -> the package that it needs if it is not the default, and the extra that installs the package."""


def packages_are_installed(config: RunConfig, world_size: int) -> Iterator[str]:
    """The packages that trackers and background saves need are installed."""
    for key, (package, extra) in PACKAGES.items():
        value = value_of(config, key)
        if value not in (None, "thread") and not installed(package):
            yield missing_message(package, f"{key}={value}", extra)


def nvrx_straggler_needs_a_gpu(config: RunConfig, world_size: int) -> Iterator[str]:
    """The detector times GPU kernels."""
    if config.nvrx_straggler is not None and config.nvrx_straggler.enabled and not has_cuda():
        yield "nvrx_straggler needs a GPU: use straggler, which names slow ranks everywhere"


def gpu_metrics_need_a_gpu(config: RunConfig, world_size: int) -> Iterator[str]:
    """GPU memory, power and kernels cannot be measured without a GPU."""
    settings = [f"profiling.{name}" for name in TOOLS[1:] if getattr(config.profiling, name, False)]
    settings += ["logger.log_energy"] if config.logger.log_energy else []
    if settings and not has_cuda():
        yield f"{settings[0]}=True needs a GPU: leave it out here (profiling.use_pytorch_profiler works everywhere)"
