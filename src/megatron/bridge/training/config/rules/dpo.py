# SPDX-License-Identifier: Apache-2.0
"""Rules on preference tuning."""

from collections.abc import Iterator
from typing import get_args

from megatron.bridge.data.config import PreferenceDatasetConfig
from megatron.bridge.training.config.blocks.dpo import PreferenceLossType
from megatron.bridge.training.config.rules.heads import OF_HEADS
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
    for name in ("desirable_weight", "undesirable_weight"):
        if dpo.loss_type != "kto" and (weight := getattr(dpo, name)) != 1:
            yield f"dpo.{name}={weight} has no effect on loss_type={dpo.loss_type}: set it to 1, or use kto"
    if config.distill is not None:
        yield "dpo and distill are both set: unset one of them"
    if config.model.mtp_num_layers:
        yield (
            f"dpo with model.mtp_num_layers={config.model.mtp_num_layers}: MTP layers predict tokens, not "
            f"preferences, unset it"
        )


def preference_data_goes_with_dpo(config: RunConfig, world_size: int) -> Iterator[str]:
    """Pairs of answers are for preference tuning, and it needs them."""
    pairs = isinstance(config.dataset, PreferenceDatasetConfig) and not isinstance(config.dataset, OF_HEADS)
    if config.dpo is not None and not pairs:
        yield (
            f"dpo learns from pairs of answers, but dataset is a {type(config.dataset).__name__}: use a "
            f"PreferenceDatasetConfig"
        )
    if pairs and config.dpo is None:
        yield "dataset is a PreferenceDatasetConfig, but dpo is not set: set it, or use a FinetuningDatasetConfig"


def labeled_answers_go_with_kto(config: RunConfig, world_size: int) -> Iterator[str]:
    """KTO learns from single answers, and estimates KL from several of them."""
    kto = config.dpo is not None and config.dpo.loss_type == "kto"
    labeled = getattr(config.dataset, "labeled", None)
    if labeled is not None and labeled != kto:
        wanted = "kto" if labeled else "sigmoid, ipo or hinge"
        yield f"dataset.labeled={labeled} goes with dpo.loss_type {wanted}: leave dataset.labeled unset"
    micro, replicas = config.train.micro_batch_size, config.data_parallel_size(world_size)
    if kto and micro * replicas < 2:
        yield (
            f"train.micro_batch_size={micro} with data parallel size {replicas} and dpo.loss_type=kto: one answer "
            "is too little to estimate KL, use a micro_batch_size of 2 or more"
        )


def adapters_can_be_switched_off(config: RunConfig, world_size: int) -> Iterator[str]:
    """Without a reference of its own, a run with adapters is compared with its base."""
    if config.dpo is not None and config.dpo.reference is None and getattr(config.peft, "modules_to_save", None):
        yield (
            "dpo.reference is not set, and peft.modules_to_save trains weights of the base in place: set "
            "dpo.reference to the weights that the run starts from"
        )
