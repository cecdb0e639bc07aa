# SPDX-License-Identifier: Apache-2.0
"""The configuration of a run.

``blocks/`` holds the fields, ``run_config`` puts the blocks together, ``resolve/`` derives what is not set,
``rules/`` checks the result, and ``container`` is the class that users make.
"""

from megatron.bridge.data.config import DatasetConfig, FinetuningDatasetConfig, GPTDatasetConfig, MockGPTDatasetConfig
from megatron.bridge.data.tokenizer import TokenizerConfig
from megatron.bridge.training.config.blocks.checkpoint import CheckpointConfig
from megatron.bridge.training.config.blocks.comm_overlap import CommOverlapConfig
from megatron.bridge.training.config.blocks.distill import DistillConfig
from megatron.bridge.training.config.blocks.distributed import DistributedDataParallelConfig, DistributedInitConfig
from megatron.bridge.training.config.blocks.dpo import DPOConfig
from megatron.bridge.training.config.blocks.logger import LoggerConfig
from megatron.bridge.training.config.blocks.mixed_precision import MixedPrecisionConfig
from megatron.bridge.training.config.blocks.optimizer import OptimizerConfig, ParameterOverride
from megatron.bridge.training.config.blocks.profiling import ProfilingConfig
from megatron.bridge.training.config.blocks.resiliency import (
    FaultToleranceConfig,
    InProcessRestartConfig,
    NVRxStragglerDetectionConfig,
    RerunStateMachineConfig,
    StragglerDetectionConfig,
)
from megatron.bridge.training.config.blocks.rng import RNGConfig
from megatron.bridge.training.config.blocks.scheduler import SchedulerConfig
from megatron.bridge.training.config.blocks.train import TrainingConfig
from megatron.bridge.training.config.blocks.validation import ValidationConfig
from megatron.bridge.training.config.container import ConfigContainer
from megatron.bridge.training.config.resolve import Resolved, resolve

__all__ = [
    "CheckpointConfig",
    "CommOverlapConfig",
    "ConfigContainer",
    "DPOConfig",
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
    "Resolved",
    "SchedulerConfig",
    "StragglerDetectionConfig",
    "TokenizerConfig",
    "TrainingConfig",
    "ValidationConfig",
    "resolve",
]
