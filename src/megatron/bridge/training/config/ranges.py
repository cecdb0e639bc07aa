# SPDX-License-Identifier: Apache-2.0
"""Legal ranges of numeric settings by dotted keys, collected from the classes that declare the fields.

To give a field a range, see ``megatron.bridge.utils.config.ranges``.
"""

import functools
from typing import Any

from megatron.bridge.data.dataset_config import DatasetConfig
from megatron.bridge.data.finetuning.sft_config import SFTDatasetConfig
from megatron.bridge.data.pretraining.gpt_config import GPTDatasetConfig
from megatron.bridge.data.tokenizer import TokenizerConfig
from megatron.bridge.models.core_ranges import TRANSFORMER_RANGES
from megatron.bridge.training.config.blocks.checkpoint import CheckpointConfig
from megatron.bridge.training.config.blocks.core_ranges import DDP_RANGES, OPTIMIZER_RANGES
from megatron.bridge.training.config.blocks.logger import LoggerConfig
from megatron.bridge.training.config.blocks.objectives import DistillConfig, DPOConfig
from megatron.bridge.training.config.blocks.reinforcement import GRPOConfig
from megatron.bridge.training.config.blocks.resiliency import StragglerDetectionConfig
from megatron.bridge.training.config.blocks.train import (
    RNGConfig,
    TrainingConfig,
    ValidationConfig,
)
from megatron.bridge.utils.config.ranges import Range, ranges_of

# classes whose modules import no torch
_LIGHT_CLASSES: list[tuple[str, type[Any]]] = [
    ("train", TrainingConfig),
    ("validation", ValidationConfig),
    ("rng", RNGConfig),
    ("checkpoint", CheckpointConfig),
    ("logger", LoggerConfig),
    ("tokenizer", TokenizerConfig),
    ("straggler", StragglerDetectionConfig),
    ("distill", DistillConfig),
    ("dpo", DPOConfig),
    ("grpo", GRPOConfig),
    ("dataset", DatasetConfig),
    ("dataset", GPTDatasetConfig),
    ("dataset", SFTDatasetConfig),
]


def _dotted(block: str, ranges: dict[str, Range]) -> dict[str, Range]:
    return {f"{block}.{name}": allowed for name, allowed in ranges.items()}


def _collect_early_ranges() -> dict[str, Range]:
    collected = {
        **_dotted("model", TRANSFORMER_RANGES),
        **_dotted("optimizer", OPTIMIZER_RANGES),
        **_dotted("ddp", DDP_RANGES),
    }
    for block, kind in _LIGHT_CLASSES:
        collected |= _dotted(block, ranges_of(kind))
    return collected


EARLY_RANGES = _collect_early_ranges()
"""Dotted key -> its range, of all settings whose range is known before torch is imported."""


@functools.cache
def all_ranges() -> dict[str, Range]:
    """Return the ranges of all settings of a run with adapters by dotted key; this imports torch."""
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.bridge.peft.lora import LoRA
    from megatron.bridge.training.config.blocks.distributed import DistributedInitConfig

    return {
        **EARLY_RANGES,
        **_dotted("model", ranges_of(GPTModelProvider)),
        **_dotted("peft", ranges_of(LoRA)),
        **_dotted("dist", ranges_of(DistributedInitConfig)),
    }
