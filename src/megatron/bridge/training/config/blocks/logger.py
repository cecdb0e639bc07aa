# SPDX-License-Identifier: Apache-2.0
"""Logs, trackers, metrics and profiles."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from megatron.bridge.utils.config.ranges import ABOVE_ZERO, AT_LEAST_ONE, AT_LEAST_ZERO, Range


@dataclass
class LoggerConfig:
    """Logs, trackers and metrics."""

    log_interval: int = 10
    """Steps between log lines."""
    logging_level: Annotated[int | None, AT_LEAST_ZERO] = None
    """Level of the Python loggers below ``megatron``; None leaves it."""
    tensorboard_dir: str | None = None
    """TensorBoard folder. None writes no TensorBoard events."""
    log_dir: str | None = None
    """Folder of ``metrics.jsonl`` and ``run_config.yaml``. None means ``checkpoint.save``."""
    wandb_project: str | None = None
    """Weights & Biases project. None turns the tracker off."""
    wandb_entity: str | None = None
    """Weights & Biases team or user."""
    wandb_exp_name: str | None = None
    """Weights & Biases run name."""
    wandb_save_dir: str | None = None
    """Folder of the local files of Weights & Biases. None means ``log_dir``."""
    mlflow_experiment: str | None = None
    """MLflow experiment. None turns the tracker off."""
    mlflow_run_name: str | None = None
    """MLflow run name."""
    mlflow_tracking_uri: str | None = None
    """URI of an MLflow server, a database (``sqlite:///runs.db``) or a folder. None leaves it to MLflow's environment
    variables."""
    comet_project: str | None = None
    """Comet project. None turns the tracker off."""
    comet_workspace: str | None = None
    """Comet workspace."""
    comet_experiment_name: str | None = None
    """Name of the experiment in Comet."""
    swanlab_project: str | None = None
    """SwanLab project. None turns the tracker off."""
    swanlab_workspace: str | None = None
    """SwanLab workspace."""
    swanlab_exp_name: str | None = None
    """Name of the run in SwanLab."""
    prometheus_port: Annotated[int | None, Range(least=1, most=65535)] = None
    """Port at which the first rank serves the metrics to Prometheus. None serves nothing."""
    prometheus_host: str = "127.0.0.1"
    """Address of that port; ``0.0.0.0`` lets other machines read the metrics, without a password."""
    otel_service_name: str | None = None
    """Send spans and metrics over OpenTelemetry's protocol under this name of a service. None sends nothing. The
    environment variables of OpenTelemetry, such as ``OTEL_EXPORTER_OTLP_ENDPOINT``, say where.
    """
    peak_tflops: Annotated[float | None, ABOVE_ZERO] = None
    """Peak dense bf16 TFLOP/s of one device, for MFU. None looks the GPU up in a table, and shows no MFU for a GPU
    that is not in it.
    """
    log_params_norm: bool = False
    """Log the L2 norm of all trained weights."""
    log_energy: bool = False
    """Log the energy per step and the power per GPU, as the driver measures them."""
    timing_log_level: Literal[0, 1, 2] = 0
    """Level of Megatron-Core's timers: 0 for none, 1 for parts that run once per step, 2 also for parts that run
    once per microbatch. Timers synchronize with the device, so steps take longer.
    """
    timing_log_option: Literal["max", "minmax", "all"] = "minmax"
    """Log the longest time over the ranks, the shortest and the longest, or the times of all ranks."""
    log_non_default_values: bool = False
    """Print the settings that differ from their defaults when the run starts."""
    sample_prompts: list[Any] = field(default_factory=list[Any])
    """Prompts that the model continues greedily before the first step, every ``sample_interval`` steps and after
    the last step: texts, or conversations as lists of messages. The answers are printed, and kept in
    ``samples.jsonl``.
    """
    sample_interval: Annotated[int | None, AT_LEAST_ONE] = None
    """Steps between samples. None samples only before the first and after the last step."""
    sample_max_new_tokens: Annotated[int, AT_LEAST_ONE] = 64
    """The maximum number of tokens of an answer."""


@dataclass
class ProfilingConfig:
    """Profiles of a few steps. Files go to ``traces`` in ``logger.log_dir``."""

    use_pytorch_profiler: bool = False
    """Write a trace of each profiled rank, for Perfetto."""
    use_nsys_profiler: bool = False
    """Open the capture range of ``nsys profile --capture-range=cudaProfilerApi``."""
    profile_step_start: int = 10
    """Start profiling after this step."""
    profile_step_end: int = 12
    """Stop profiling after this step."""
    profile_ranks: list[int] = field(default_factory=lambda: [0])
    """Ranks to profile. An empty list means all."""
    record_shapes: bool = False
    """Record the input shapes of operators."""
    record_memory_history: bool = False
    """Record every GPU allocation with its stack, from the start to ``profile_step_end``. The snapshot is written
    at that step, or when the run fails.
    """
    memory_snapshot_path: str | None = None
    """Snapshot file; ``_rank_N`` is added to its name. None means ``memory.pickle`` in ``traces``."""
    nvtx_ranges: bool = False
    """Add NVTX ranges for steps, forward and backward passes, and Megatron-Core's layers."""
