# SPDX-License-Identifier: Apache-2.0
"""The blocks of a run, put together: what ``resolve`` and ``rules`` read."""

from dataclasses import dataclass, field

from megatron.bridge.data.config import DatasetConfig
from megatron.bridge.data.tokenizer import TokenizerConfig
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.peft.base import PEFT
from megatron.bridge.training.config.blocks.checkpoint import CheckpointConfig
from megatron.bridge.training.config.blocks.distributed import (
    CommOverlapConfig,
    DistributedDataParallelConfig,
    DistributedInitConfig,
)
from megatron.bridge.training.config.blocks.logger import LoggerConfig, ProfilingConfig
from megatron.bridge.training.config.blocks.mixed_precision import MixedPrecisionConfig
from megatron.bridge.training.config.blocks.objectives import DistillConfig, DPOConfig
from megatron.bridge.training.config.blocks.optimizer import OptimizerConfig
from megatron.bridge.training.config.blocks.reinforcement import GRPOConfig
from megatron.bridge.training.config.blocks.resiliency import (
    FaultToleranceConfig,
    InProcessRestartConfig,
    NVRxStragglerDetectionConfig,
    RerunStateMachineConfig,
    StragglerDetectionConfig,
)
from megatron.bridge.training.config.blocks.train import (
    RNGConfig,
    SchedulerConfig,
    TrainingConfig,
    ValidationConfig,
)
from megatron.bridge.utils import distributed


@dataclass(kw_only=True)
class RunConfig:
    """The fields of ``ConfigContainer``.

    A block that is None is off. Blocks of features that do not exist yet are typed ``None``: setting one is
    refused by name.
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
    dpo: DPOConfig | None = None
    grpo: GRPOConfig | None = None
    comm_overlap: CommOverlapConfig | None = None
    rerun_state_machine: RerunStateMachineConfig | None = None
    inprocess_restart: InProcessRestartConfig | None = None
    tensor_inspect: None = None

    def data_parallel_size(self, world_size: int | None = None) -> int:
        """Ranks that train on different samples, among ``world_size`` processes (those of this job if None)."""
        world_size = distributed.world_size() if world_size is None else world_size
        model = self.model
        return world_size // (
            model.tensor_model_parallel_size
            * model.pipeline_model_parallel_size
            * model.context_parallel_size
        )
