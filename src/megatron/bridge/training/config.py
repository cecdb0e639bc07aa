# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingTypeStubs=false
"""The configuration of a run: plain dataclasses, resolved and checked once by ``ConfigContainer.validate``.

A field whose default is None is derived when the config is validated; a value that somebody set is never
replaced. Blocks that need features which do not exist yet are typed ``None``: setting one is refused by name.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from megatron.core.distributed import DistributedDataParallelConfig as CoreDistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig as CoreOptimizerConfig

from megatron.bridge.data.config import (
    DatasetConfig,
    FinetuningDatasetConfig,
    GPTDatasetConfig,
    MockGPTDatasetConfig,
)
from megatron.bridge.data.tokenizer import TokenizerConfig
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.peft.base import PEFT
from megatron.bridge.training.comm_overlap import CommOverlapConfig
from megatron.bridge.training.distillation.config import DistillConfig
from megatron.bridge.training.mixed_precision import MixedPrecisionConfig
from megatron.bridge.training.param_groups import ParameterOverride
from megatron.bridge.utils import dist as process
from megatron.bridge.utils.errors import UserError

__all__ = [
    "CheckpointConfig",
    "CommOverlapConfig",
    "ConfigContainer",
    "DatasetConfig",
    "DistillConfig",
    "DistributedDataParallelConfig",
    "DistributedInitConfig",
    "FaultToleranceConfig",
    "FinetuningDatasetConfig",
    "GPTDatasetConfig",
    "InProcessRestartConfig",
    "LoggerConfig",
    "MixedPrecisionConfig",
    "MockGPTDatasetConfig",
    "NVRxStragglerDetectionConfig",
    "OptimizerConfig",
    "ParameterOverride",
    "ProfilingConfig",
    "RNGConfig",
    "RerunStateMachineConfig",
    "SchedulerConfig",
    "StragglerDetectionConfig",
    "TokenizerConfig",
    "TrainingConfig",
    "ValidationConfig",
]


@dataclass
class TrainingConfig:
    """How much to train.

    Attributes:
        micro_batch_size: Samples in one forward pass of one data-parallel rank.
        global_batch_size: Samples in one optimizer step, over all ranks.
        rampup_batch_size: ``[start, increment, samples]``: begin with ``start`` samples in a step and add
            ``increment`` at equal distances, to reach ``global_batch_size`` after ``samples`` samples.
        train_iters: Optimizer steps of the whole run, resumed parts included.
        train_samples: Samples of the whole run, instead of ``train_iters``: as many steps as they are enough for.
        exit_interval: Stop after a step whose number is a multiple of this (a checkpoint is saved first).
        exit_duration_in_mins: Save and stop at the end of the step in which this time is over, counted from the
            start of this process; the exit code is 75, which asks to be started again.
        exit_signal_handler: Do the same at SIGTERM and SIGUSR1, if ``checkpoint.save`` is set.
        iterations_to_skip: Steps whose batch is drawn but not learned from.
        frozen: Patterns of parameters that are not trained, such as ``embedding.*`` or
            ``decoder.layers.0.*``: Megatron's names, ``*`` for any characters, layers counted through all stages.
        manual_gc: Switch Python's automatic garbage collection off and collect at the same step on all ranks.
        manual_gc_interval: Steps between collections with ``manual_gc``; 0 collects only around evaluation.
    """

    micro_batch_size: int = 1
    global_batch_size: int = 1
    rampup_batch_size: list[int] | None = None
    train_iters: int = 0
    train_samples: int | None = None
    exit_interval: int | None = None
    exit_duration_in_mins: float | None = None
    exit_signal_handler: bool = True
    iterations_to_skip: list[int] = field(default_factory=list[int])
    frozen: list[str] = field(default_factory=list[str])
    manual_gc: bool = False
    manual_gc_interval: int = 0


@dataclass
class ValidationConfig:
    """Evaluation on held-out data.

    Attributes:
        eval_interval: Steps between evaluations; None evaluates once, at the end.
        eval_iters: Global batches in one evaluation; 0 switches evaluation off.
    """

    eval_interval: int | None = None
    eval_iters: int = 0


@dataclass
class OptimizerConfig(CoreOptimizerConfig):
    """Megatron-Core's optimizer settings; the fields below are derived unless set.

    Attributes:
        overrides: Parameters that have learning rates or weight decay of their own.
        muon_tp_mode: ``duplicated`` and ``distributed`` update as one process does; ``blockwise``, Megatron-Core's
            default, orthogonalises each tensor-parallel part by itself, which is another optimizer.
        use_distributed_optimizer: None shards the optimizer state when there is more than one data-parallel
            rank (with one rank it only costs time) and the optimizer is Adam.
        bf16, fp16, params_dtype: from ``mixed_precision``, or from the model when that is not set.
    """

    overrides: list[ParameterOverride] = field(default_factory=list[ParameterOverride])
    muon_tp_mode: str = "duplicated"
    use_distributed_optimizer: bool | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    overlap_param_gather: bool | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    bf16: bool | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    fp16: bool | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    params_dtype: Any = None


@dataclass
class SchedulerConfig:
    """Learning rate and weight decay over the run, in steps of the optimizer or in samples.

    Attributes:
        lr_decay_style: Shape after warm-up.
        lr_decay_iters: Steps until ``optimizer.min_lr``; None: ``train.train_iters``, if warm-up is over then.
        lr_decay_samples: The same in samples, instead.
        lr_warmup_iters: Steps of linear warm-up.
        lr_warmup_samples: The same in samples, instead.
        lr_warmup_fraction: Warm-up as a fraction of the decay's samples, instead of either.
        lr_warmup_init: Learning rate at the first warm-up step.
        lr_wsd_decay_style: Shape of the final decay of the WSD schedule.
        lr_wsd_decay_iters: Length of that decay.
        lr_wsd_decay_samples: The same in samples, instead.
        start_weight_decay: None means ``optimizer.weight_decay``; so does None in ``end_weight_decay``.
        weight_decay_incr_style: Shape of the way from the start to the end value.
        use_checkpoint_opt_param_scheduler: On resume, take the schedule from the checkpoint.
        override_opt_param_scheduler: On resume, take the schedule from this config. With neither, a resumed run
            whose schedule differs from the checkpoint's is refused.
    """

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "linear"
    lr_decay_iters: int | None = None
    lr_decay_samples: int | None = None
    lr_warmup_iters: int = 0
    lr_warmup_samples: int | None = None
    lr_warmup_fraction: float | None = None
    lr_warmup_init: float = 0.0
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    lr_wsd_decay_iters: int | None = None
    lr_wsd_decay_samples: int | None = None
    start_weight_decay: float | None = None
    end_weight_decay: float | None = None
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    use_checkpoint_opt_param_scheduler: bool = False
    override_opt_param_scheduler: bool = False


@dataclass
class DistributedDataParallelConfig(CoreDistributedDataParallelConfig):
    """Megatron-Core's data-parallel settings; the fields below are derived unless set.

    Attributes:
        grad_reduce_in_fp32: None follows ``mixed_precision``; a value that contradicts it is refused.
        use_distributed_optimizer: None shards when there is more than one data-parallel rank.
        data_parallel_sharding_strategy: What ``use_megatron_fsdp`` cuts: ``optim``, ``optim_grads``, or, as with
            None, weights as well (``optim_grads_params``).
    """

    grad_reduce_in_fp32: bool | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    use_distributed_optimizer: bool | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    data_parallel_sharding_strategy: str | None = None  # pyright: ignore[reportIncompatibleVariableOverride]


@dataclass
class CheckpointConfig:
    """What is saved and loaded, where and when.

    Attributes:
        save: Run folder; checkpoints, metrics and the resolved config go there. A run goes on from the newest
            checkpoint in it. None saves nothing.
        load: Folder to go on from when there is no checkpoint in ``save`` yet.
        save_interval: Steps between checkpoints; the last step is always saved.
        pretrained_checkpoint: Weights to start from: a Megatron checkpoint or a Hugging Face directory.
        most_recent_k: Checkpoints to keep, the newest; -1 keeps all.
        save_optim, save_rng: Save the optimizer's state, the random states.
        load_optim, load_rng: Restore them.
        finetune: Take only weights from ``load``, and start at step 0.
        async_save: Write in the background; the run is stopped only until the state is safe from change.
        async_strategy: Who writes then: a ``thread`` of each process, or ``nvrx``: a process of
            nvidia-resiliency-ext beside each.
        verify: How a checkpoint is compared with its manifest before it is used: ``full`` reads every file,
            ``fast`` compares sizes and reads small files only.
        when_damaged: With a damaged checkpoint in ``save``: go on from the one before, or refuse to start.
        non_persistent_save_interval: Steps between checkpoints of which only the newest is kept, and only until
            the run has ended.
        non_persistent_ckpt_type: ``global`` is like the others, in a folder of its own; ``local`` is each rank's
            part on the disk of its machine; ``in_memory`` is the same in memory, for ``inprocess_restart``.
        non_persistent_global_ckpt_dir: Folder of the first; None means ``non_persistent`` in ``save``.
        non_persistent_local_ckpt_dir: Folder of the second, on every machine.
    """

    save: str | None = None
    load: str | None = None
    save_interval: int | None = None
    pretrained_checkpoint: str | None = None
    most_recent_k: int = -1
    save_optim: bool = True
    save_rng: bool = True
    load_optim: bool = True
    load_rng: bool = True
    finetune: bool = False
    async_save: bool = False
    async_strategy: Literal["thread", "nvrx"] = "thread"
    verify: Literal["full", "fast"] = "full"
    when_damaged: Literal["use_previous", "refuse"] = "use_previous"
    non_persistent_save_interval: int | None = None
    non_persistent_ckpt_type: Literal["global", "local", "in_memory"] | None = None
    non_persistent_global_ckpt_dir: str | None = None
    non_persistent_local_ckpt_dir: str | None = None


@dataclass
class RerunStateMachineConfig:
    """What is done about a step whose numbers are wrong; needs no time unless one is.

    Attributes:
        check_for_nan_in_loss: Repeat a step whose loss is not finite.
        check_for_nan_in_grad: Repeat a step whose gradient is not finite; with fp16 such steps are skipped anyway.
        check_for_spiky_loss: Repeat a step whose loss is ``spiky_loss_factor`` times the largest of the first
            ``spiky_loss_samples`` steps.
        when_persistent: If it is wrong again: ``stop``, or ``skip``, which notes the batch in the run's folder and
            ends with exit code 75; started again, the run leaves it out.
    """

    check_for_nan_in_loss: bool = True
    check_for_nan_in_grad: bool = True
    check_for_spiky_loss: bool = False
    spiky_loss_factor: float = 10.0
    spiky_loss_samples: int = 100
    when_persistent: Literal["stop", "skip"] = "stop"


@dataclass
class StragglerDetectionConfig:
    """Who is slow; see ``callbacks.stragglers``.

    Attributes:
        interval: Steps between comparisons.
        factor: A rank that takes so many times the median is named.
    """

    interval: int = 20
    factor: float = 1.5


@dataclass
class NVRxStragglerDetectionConfig:
    """Slow GPUs, by nvidia-resiliency-ext; see ``training.nvrx_straggler``.

    Attributes:
        enabled: Whether it is used.
        report_time_interval: Seconds between comparisons.
        calc_relative_gpu_perf: Compare GPUs with each other.
        calc_individual_gpu_perf: Compare each with what it has done before.
        gpu_relative_perf_threshold, gpu_individual_perf_threshold: Scores below these are slow; 1 is the best.
        profiling_interval: Every how many steps kernels are timed.
        stop_if_detected: Save and end with exit code 75, to be started again elsewhere.
    """

    enabled: bool = True
    report_time_interval: float = 300.0
    calc_relative_gpu_perf: bool = True
    calc_individual_gpu_perf: bool = True
    gpu_relative_perf_threshold: float = 0.7
    gpu_individual_perf_threshold: float = 0.7
    profiling_interval: int = 1
    stop_if_detected: bool = False


@dataclass
class FaultToleranceConfig:
    """Signs of life for ``ft_launcher``; see ``training.fault_tolerance``.

    Attributes:
        enable_ft_package: Whether they are given.
        calc_ft_timeouts: At the end of a run, calculate timeouts from what was seen; they are kept in
            ``checkpoint.save`` and used from the next start on, instead of the launcher's.
        simulate_fault: Let one rank fail, once in a run.
        simulated_fault_type: It is killed, or stopped, or either.
        simulated_fault_rank: Which one; None draws it.
        simulated_fault_base_delay: Seconds from the first step on, at least; up to a fifth more.
    """

    enable_ft_package: bool = True
    calc_ft_timeouts: bool = False
    simulate_fault: bool = False
    simulated_fault_type: Literal["rank_killed", "rank_hung", "random"] = "random"
    simulated_fault_rank: int | None = None
    simulated_fault_base_delay: float = 0.0


@dataclass
class InProcessRestartConfig:
    """Starting again in the same processes; see ``training.inprocess_restart``. Times are in seconds.

    Attributes:
        enabled: Whether that is done.
        max_iterations: Attempts in one process, the first included; None sets no limit.
        soft_timeout: A rank whose Python code makes no step for so long is interrupted, and all start again. It
            must be longer than the longest call into native code, such as a collective that waits for a slow rank.
        hard_timeout: A rank that does not react to that is killed.
        heartbeat_interval, heartbeat_timeout: How often ranks tell that their process lives, and when it is dead.
        barrier_timeout: How long ranks wait for each other between attempts.
        completion_timeout: How long finished ranks wait for the others.
        last_call_wait: How long other failures are waited for before all start again.
        termination_grace_time: From SIGTERM to SIGKILL.
        monitor_thread_interval, monitor_process_interval, progress_watchdog_interval: How often is looked.
    """

    enabled: bool = True
    max_iterations: int | None = 10
    soft_timeout: float = 60.0
    hard_timeout: float = 90.0
    heartbeat_interval: float = 1.0
    heartbeat_timeout: float = 30.0
    barrier_timeout: float = 120.0
    completion_timeout: float = 120.0
    last_call_wait: float = 1.0
    termination_grace_time: float = 5.0
    monitor_thread_interval: float = 1.0
    monitor_process_interval: float = 1.0
    progress_watchdog_interval: float = 1.0


@dataclass
class LoggerConfig:
    """What the run shows.

    Attributes:
        log_interval: Steps between log lines.
        tensorboard_dir: TensorBoard folder; None writes none.
        log_dir: Folder of ``metrics.jsonl`` and ``run_config.yaml``; None means ``checkpoint.save``.
        wandb_project: Project of Weights & Biases; None sends nothing there.
        wandb_entity: Team or user that it belongs to.
        wandb_exp_name: Name of the run there.
        wandb_save_dir: Folder of its own files; None means ``log_dir``.
        mlflow_experiment: Experiment of MLflow; None sends nothing there.
        mlflow_run_name: Name of the run there.
        mlflow_tracking_uri: Where MLflow keeps its runs; None is what its environment says.
        peak_tflops: What MFU is a share of: dense bf16 TFLOP/s of one process's device; None takes it from the
            GPU's name, and shows no MFU where that is not in the table.
        log_params_norm: Show the L2 norm of all trained weights.
        log_energy: Show the energy of a step and the power of a GPU, as the driver measures them.
        timing_log_level: Time parts of a step by Megatron-Core's timers: 1 those that run once in a step, 2 also
            those that run for each microbatch. Each waits for the device, so steps take longer; 0 times none.
        timing_log_option: Of the ranks' times show the longest, the longest and the shortest, or all.
        log_non_default_values: Print at the start which settings differ from their defaults.
    """

    log_interval: int = 10
    tensorboard_dir: str | None = None
    log_dir: str | None = None
    wandb_project: str | None = None
    wandb_entity: str | None = None
    wandb_exp_name: str | None = None
    wandb_save_dir: str | None = None
    mlflow_experiment: str | None = None
    mlflow_run_name: str | None = None
    mlflow_tracking_uri: str | None = None
    peak_tflops: float | None = None
    log_params_norm: bool = False
    log_energy: bool = False
    timing_log_level: Literal[0, 1, 2] = 0
    timing_log_option: Literal["max", "minmax", "all"] = "minmax"
    log_non_default_values: bool = False


@dataclass
class ProfilingConfig:
    """Profiles of a few steps; see ``callbacks.profiling``. Files go to ``traces`` in ``logger.log_dir``.

    Attributes:
        use_pytorch_profiler: Write a trace of each profiled rank, for Perfetto.
        use_nsys_profiler: Open the capture range of ``nsys profile --capture-range=cudaProfilerApi``.
        profile_step_start: Begin after this step.
        profile_step_end: End after this one.
        profile_ranks: Which ranks; an empty list means all.
        record_shapes: Keep the shapes of what operators get.
        record_memory_history: From the start to ``profile_step_end``, keep every allocation on the GPU with its
            stack; written there, or where the run fails.
        memory_snapshot_path: The file, to which ``_rank_N`` is added; None means ``memory.pickle`` in ``traces``.
        nvtx_ranges: Mark steps, their halves and Megatron-Core's layers for nsys.
    """

    use_pytorch_profiler: bool = False
    use_nsys_profiler: bool = False
    profile_step_start: int = 10
    profile_step_end: int = 12
    profile_ranks: list[int] = field(default_factory=lambda: [0])
    record_shapes: bool = False
    record_memory_history: bool = False
    memory_snapshot_path: str | None = None
    nvtx_ranges: bool = False


@dataclass
class RNGConfig:
    """Random numbers.

    Attributes:
        seed: Seed of weights, dropout and data order.
        data_parallel_random_init: Give each data-parallel rank its own seed; the first rank's weights are then
            broadcast.
    """

    seed: int = 1234
    data_parallel_random_init: bool = False


@dataclass
class DistributedInitConfig:
    """The process group.

    Attributes:
        distributed_backend: None takes nccl where there is CUDA, else gloo.
        distributed_timeout_minutes: A collective that takes longer ends the run.
        hang_timeout_minutes: If no step moves on for so long, the rank that the others wait for is named, stacks
            are dumped, and the run ends with exit code 76. It must be longer than an evaluation batch or a save.
        use_torch_fsdp2: PyTorch's fully sharded data parallelism instead of Megatron-Core's: weights, gradients
            and optimizer state are cut over the ranks that would hold the same; see docs/optimizers.md.
    """

    distributed_backend: Literal["nccl", "gloo"] | None = None
    distributed_timeout_minutes: int = 10
    hang_timeout_minutes: float | None = None
    use_torch_fsdp2: bool = False


def _refuse(problems: list[str]) -> None:
    if problems:
        raise UserError("\n".join(problems))


@dataclass(kw_only=True)
class ConfigContainer:
    """Everything that a run needs.

    Example:
        >>> config = ConfigContainer(train=..., model=..., ...)  # doctest: +SKIP
        >>> config.validate()  # doctest: +SKIP
    """

    train: TrainingConfig
    model: GPTModelProvider
    optimizer: OptimizerConfig
    scheduler: SchedulerConfig
    dataset: DatasetConfig
    logger: LoggerConfig
    tokenizer: TokenizerConfig
    checkpoint: CheckpointConfig
    ddp: DistributedDataParallelConfig = field(  # pyright: ignore - it fails on the untyped base class
        default_factory=DistributedDataParallelConfig  # pyright: ignore
    )
    rng: RNGConfig = field(default_factory=RNGConfig)
    dist: DistributedInitConfig = field(default_factory=DistributedInitConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    mixed_precision: str | MixedPrecisionConfig | None = None
    ft: FaultToleranceConfig | None = None
    straggler: StragglerDetectionConfig | None = None
    nvrx_straggler: NVRxStragglerDetectionConfig | None = None
    profiling: ProfilingConfig | None = None
    peft: PEFT | None = None
    distill: DistillConfig | None = None
    comm_overlap: CommOverlapConfig | None = None
    rerun_state_machine: RerunStateMachineConfig | None = None
    inprocess_restart: InProcessRestartConfig | None = None
    tensor_inspect: None = None

    def data_parallel_size(self, world_size: int | None = None) -> int:
        """Ranks that see different samples, in a world of ``world_size`` (this job's, if not given)."""
        world_size = process.world_size() if world_size is None else world_size
        model = self.model
        return world_size // (
            model.tensor_model_parallel_size * model.pipeline_model_parallel_size * model.context_parallel_size
        )

    def validate(self, world_size: int | None = None) -> list[str]:
        """Derive what is not set, then check everything; safe to call again.

        Args:
            world_size: Number of processes to validate for, on another machine, of which nothing is known; None
                means this job's, on this one.

        Returns:
            A sentence for each value that was replaced, to be shown to the user.

        Raises:
            UserError: one line per problem, all of them together.
        """
        # these modules read this one's dataclasses
        from megatron.bridge.training.resolve import resolve, without_quantisation
        from megatron.bridge.training.resolve_data import resolve_data
        from megatron.bridge.training.rules import HERE, RULES, SIZES, violations

        here = world_size is None
        world_size = process.world_size() if world_size is None else world_size
        _refuse(violations(SIZES, self, world_size))
        findings = resolve(self, world_size, here)
        findings.notes += resolve_data(self, world_size)
        rules = (*RULES, *HERE) if here else RULES
        _refuse([*findings.problems, *self.dataset.problems(), *violations(rules, self, world_size)])
        try:
            (self.model if here else without_quantisation(self.model)).finalize()
        except (ValueError, AssertionError) as error:
            raise UserError(f"model: {error}") from error
        return findings.notes

    def to_yaml(self) -> str:
        """The config as YAML that ``from_yaml`` reads back exactly."""
        from megatron.bridge.utils.config.serialize import dump_yaml

        return dump_yaml(self)

    @classmethod
    def from_yaml(cls, text: str) -> "ConfigContainer":
        """The config that ``to_yaml`` wrote.

        Raises:
            UserError: unknown keys, or YAML of something else.
        """
        from megatron.bridge.utils.config.serialize import load_yaml

        config = load_yaml(text)
        if not isinstance(config, cls):
            raise UserError(f"the YAML holds a {type(config).__name__}, not a {cls.__name__}")
        return config

    def log_non_default_values(self) -> None:
        """Print the settings that differ from their defaults: key, value, default, and who set it."""
        from megatron.bridge.utils.config.origins import non_defaults
        from megatron.bridge.utils.console import console

        for line in non_defaults(self):
            console().print(line, markup=False)

    def print_yaml(self) -> None:
        """Show the config on the console."""
        from megatron.bridge.utils.console import console

        console().print(self.to_yaml(), markup=False)
