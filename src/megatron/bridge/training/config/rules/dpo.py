# SPDX-License-Identifier: Apache-2.0
"""Rules on preference tuning."""

from collections.abc import Iterator
from typing import get_args

from megatron.bridge.data.config import EmbeddingDatasetConfig, PreferenceDatasetConfig, RewardDatasetConfig
from megatron.bridge.training.config.blocks.dpo import PreferenceLossType
from megatron.bridge.training.config.run_config import RunConfig


def dpo_settings_are_valid(config: RunConfig, world_size: int) -> Iterator[str]:
    """The values of ``dpo`` are valid, and fit the other blocks."""
    dpo = config.dpo
    if dpo is None:
        return
    if dpo.loss_type not in get_args(PreferenceLossType):
        yield f"dpo.loss_type={dpo.loss_type}: use one of {', '.join(get_args(PreferenceLossType))}"
    if not 0 <= dpo.label_smoothing < 0.5:
        yield f"dpo.label_smoothing={dpo.label_smoothing}: must be at least 0 and below 0.5"
    if dpo.label_smoothing and dpo.loss_type != "sigmoid":
        yield f"dpo.label_smoothing={dpo.label_smoothing} has no effect on loss_type={dpo.loss_type}: set it to 0"
    if config.distill is not None:
        yield "dpo and distill are both set: unset one of them"
    if config.model.mtp_num_layers:
        yield (
            f"dpo with model.mtp_num_layers={config.model.mtp_num_layers}: MTP layers predict tokens, not "
            f"preferences, unset it"
        )


def preference_data_goes_with_dpo(config: RunConfig, world_size: int) -> Iterator[str]:
    """Pairs of answers are for preference tuning, and it needs them."""
    of_heads = isinstance(config.dataset, RewardDatasetConfig | EmbeddingDatasetConfig)
    pairs = isinstance(config.dataset, PreferenceDatasetConfig) and not of_heads
    if config.dpo is not None and not pairs:
        yield (
            f"dpo learns from pairs of answers, but dataset is a {type(config.dataset).__name__}: use a "
            f"PreferenceDatasetConfig"
        )
    if pairs and config.dpo is None:
        yield "dataset is a PreferenceDatasetConfig, but dpo is not set: set it, or use a FinetuningDatasetConfig"


def adapters_can_be_switched_off(config: RunConfig, world_size: int) -> Iterator[str]:
    """Without a reference of its own, a run with adapters is compared with its base."""
    if config.dpo is not None and config.dpo.reference is None and getattr(config.peft, "modules_to_save", None):
        yield (
            "dpo.reference is not set, and peft.modules_to_save trains weights of the base in place: set "
            "dpo.reference to the weights that the run starts from"
        )
