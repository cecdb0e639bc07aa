# SPDX-License-Identifier: Apache-2.0
"""The configuration of a run.

``blocks/`` holds the fields, ``run_config`` puts the blocks together, ``resolve/`` derives what is not set,
``rules/`` checks the result, and ``container`` is the class that users make. ``early`` checks overrides before torch
is imported; the names whose modules need torch are therefore imported at their first use.
"""

from typing import TYPE_CHECKING

from megatron.bridge.data.tokenizer import TokenizerConfig as TokenizerConfig
from megatron.bridge.training.config.blocks.checkpoint import CheckpointConfig as CheckpointConfig
from megatron.bridge.training.config.blocks.logger import LoggerConfig as LoggerConfig
from megatron.bridge.training.config.blocks.logger import ProfilingConfig as ProfilingConfig
from megatron.bridge.training.config.blocks.objectives import DistillConfig as DistillConfig
from megatron.bridge.training.config.blocks.objectives import DPOConfig as DPOConfig
from megatron.bridge.training.config.blocks.reinforcement import CriticConfig as CriticConfig
from megatron.bridge.training.config.blocks.reinforcement import GRPOConfig as GRPOConfig
from megatron.bridge.training.config.blocks.reinforcement import (
    RolloutServerConfig as RolloutServerConfig,
)
from megatron.bridge.training.config.blocks.resiliency import (
    FaultToleranceConfig as FaultToleranceConfig,
)
from megatron.bridge.training.config.blocks.resiliency import (
    InProcessRestartConfig as InProcessRestartConfig,
)
from megatron.bridge.training.config.blocks.resiliency import (
    NVRxStragglerDetectionConfig as NVRxStragglerDetectionConfig,
)
from megatron.bridge.training.config.blocks.resiliency import (
    RerunStateMachineConfig as RerunStateMachineConfig,
)
from megatron.bridge.training.config.blocks.resiliency import (
    StragglerDetectionConfig as StragglerDetectionConfig,
)
from megatron.bridge.training.config.blocks.train import RNGConfig as RNGConfig
from megatron.bridge.training.config.blocks.train import SchedulerConfig as SchedulerConfig
from megatron.bridge.training.config.blocks.train import TrainingConfig as TrainingConfig
from megatron.bridge.training.config.blocks.train import ValidationConfig as ValidationConfig
from megatron.bridge.utils.optional_imports import lazy_names

if TYPE_CHECKING:
    from megatron.bridge.data.config import DatasetConfig as DatasetConfig
    from megatron.bridge.data.config import FinetuningDatasetConfig as FinetuningDatasetConfig
    from megatron.bridge.data.config import GPTDatasetConfig as GPTDatasetConfig
    from megatron.bridge.data.config import MockGPTDatasetConfig as MockGPTDatasetConfig
    from megatron.bridge.training.config.blocks.distributed import (
        CommOverlapConfig as CommOverlapConfig,
    )
    from megatron.bridge.training.config.blocks.distributed import (
        DistributedDataParallelConfig as DistributedDataParallelConfig,
    )
    from megatron.bridge.training.config.blocks.distributed import (
        DistributedInitConfig as DistributedInitConfig,
    )
    from megatron.bridge.training.config.blocks.mixed_precision import (
        MixedPrecisionConfig as MixedPrecisionConfig,
    )
    from megatron.bridge.training.config.blocks.optimizer import OptimizerConfig as OptimizerConfig
    from megatron.bridge.training.config.blocks.optimizer import (
        ParameterOverride as ParameterOverride,
    )
    from megatron.bridge.training.config.container import ConfigContainer as ConfigContainer
    from megatron.bridge.training.config.resolve import Resolved as Resolved

_HEAVY = {
    "megatron.bridge.data.config": (
        "DatasetConfig",
        "FinetuningDatasetConfig",
        "GPTDatasetConfig",
        "MockGPTDatasetConfig",
    ),
    f"{__name__}.blocks.distributed": (
        "CommOverlapConfig",
        "DistributedDataParallelConfig",
        "DistributedInitConfig",
    ),
    f"{__name__}.blocks.mixed_precision": ("MixedPrecisionConfig",),
    f"{__name__}.blocks.optimizer": ("OptimizerConfig", "ParameterOverride"),
    f"{__name__}.container": ("ConfigContainer",),
    f"{__name__}.resolve": ("Resolved",),
}
__getattr__ = lazy_names(
    __name__, {name: f"{module}:{name}" for module, names in _HEAVY.items() for name in names}
)
