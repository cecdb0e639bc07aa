# SPDX-License-Identifier: Apache-2.0
"""Rules on what a model learns: distillation, preference tuning, heads, and adapters."""

from collections.abc import Iterator
from typing import get_args

from megatron.bridge.data.config import (
    ClassificationDatasetConfig,
    EmbeddingDatasetConfig,
    PreferenceDatasetConfig,
    RecordDatasetConfig,
    RewardDatasetConfig,
    TokenClassificationDatasetConfig,
)
from megatron.bridge.training.config.blocks.objectives import DistillConfig, PreferenceLossType
from megatron.bridge.training.config.resolve.data import tuning_parts
from megatron.bridge.training.config.run_config import RunConfig

OF_HEADS = (ClassificationDatasetConfig, EmbeddingDatasetConfig, RewardDatasetConfig, TokenClassificationDatasetConfig)


def head_fits_the_data(config: RunConfig, world_size: int) -> Iterator[str]:
    """Records of texts and classes are for the head that learns from them."""
    wanted = _dataset_for(config)
    for part in tuning_parts(config.dataset):
        if wanted is None and isinstance(part, OF_HEADS):
            yield f"dataset is a {type(part).__name__}, but model.head is not set: set it, or use other data"
        elif wanted is not None and not isinstance(part, wanted):
            yield (
                f"model.head={config.model.head} with num_labels={config.model.num_labels} needs a dataset of "
                f"the class {wanted.__name__}, but dataset is a {type(part).__name__}: change one of them"
            )


def _dataset_for(config: RunConfig) -> type[RecordDatasetConfig] | None:
    model = config.model
    if model.head is None:
        return None
    if model.head == "embedding":
        return EmbeddingDatasetConfig
    if model.head == "token_classification":
        return TokenClassificationDatasetConfig
    return RewardDatasetConfig if model.num_labels == 1 else ClassificationDatasetConfig


def adapters_leave_a_new_head_untrained(config: RunConfig, world_size: int) -> Iterator[str]:
    """With adapters, the base model is frozen, and a head that is not saved with them would stay random."""
    kept: list[str] = getattr(config.peft, "modules_to_save", None) or []
    trained = any(name.endswith("output_layer") for name in kept)
    if config.peft is not None and config.model.num_labels is not None and not trained:
        yield (
            f"model.head={config.model.head} with peft.modules_to_save={kept}: the head would not be trained, "
            "add output_layer to peft.modules_to_save"
        )


def heads_have_their_own_losses(config: RunConfig, world_size: int) -> Iterator[str]:
    """Distillation and DPO compare probabilities of tokens, which a model with a head has not."""
    for name in ("distill", "dpo"):
        if config.model.head is not None and getattr(config, name) is not None:
            yield f"model.head={config.model.head} with {name}: a head has no tokens to compare, unset one of them"


def contrastive_training_has_negatives(config: RunConfig, world_size: int) -> Iterator[str]:
    """The other texts of a microbatch are what a query is told apart from."""
    model, micro = config.model, config.train.micro_batch_size
    if model.head != "embedding":
        return
    if micro < 2:
        yield f"train.micro_batch_size={micro} with model.head=embedding: use 2 or more, the others are negatives"
    if not model.contrastive_temperature > 0:
        yield f"model.contrastive_temperature={model.contrastive_temperature}: must be above 0"


def peft_settings_are_valid(config: RunConfig, world_size: int) -> Iterator[str]:
    """The PEFT method accepts its settings."""
    if config.peft is not None:
        yield from config.peft.problems()


def peft_needs_pretrained_checkpoint(config: RunConfig, world_size: int) -> Iterator[str]:
    """Adapters need base weights."""
    if config.peft is not None and config.checkpoint.pretrained_checkpoint is None:
        yield (
            f"peft is {type(config.peft).__name__}, but checkpoint.pretrained_checkpoint is not set: give the "
            "weights to put the adapters on, a Megatron checkpoint or a Hugging Face directory"
        )


def distill_settings_are_valid(config: RunConfig, world_size: int) -> Iterator[str]:
    """The values of ``distill`` are valid, and fit the other blocks."""
    if config.distill is not None:
        for check in (_values, _hidden_states, _cache):
            yield from check(config.distill, config)


def _values(distill: DistillConfig, config: RunConfig) -> Iterator[str]:
    if distill.teacher is None and distill.cache is None:
        yield "distill.teacher is not set: give a Hugging Face directory, a hub id or a Megatron checkpoint"
    if not (distill.kl_weight or distill.hidden_weight):
        yield (
            "distill.kl_weight=0 and distill.hidden_weight=0 leave nothing to learn: raise one of them, "
            "or unset distill"
        )
    vocabulary = config.model.vocab_size or float("inf")
    if distill.top_k is not None and not 0 < distill.top_k < vocabulary:
        yield f"distill.top_k={distill.top_k}: must lie between 1 and the vocabulary of {vocabulary}, or be unset"
    if config.model.mtp_num_layers:
        yield (
            f"distill with model.mtp_num_layers={config.model.mtp_num_layers}: the teacher gives no logits for "
            "MTP layers, unset it"
        )


def _hidden_states(distill: DistillConfig, config: RunConfig) -> Iterator[str]:
    model = config.model
    if bool(distill.hidden_layers) != (distill.hidden_weight > 0):
        yield (
            f"distill.hidden_weight={distill.hidden_weight} with hidden_layers={distill.hidden_layers}: set both, "
            "or none"
        )
    if not distill.hidden_layers:
        return
    for layer in distill.hidden_layers:
        if not 1 <= layer <= model.num_layers:
            yield f"distill.hidden_layers: the student has layers 1 to {model.num_layers}, not {layer}"
    if model.recompute_granularity == "full":
        yield (
            "distill.hidden_layers with model.recompute_granularity=full: hidden states of recomputed layers have "
            "no gradient, use selective"
        )
    if model.virtual_pipeline_model_parallel_size is not None:
        yield (
            "distill.hidden_layers with model.virtual_pipeline_model_parallel_size="
            f"{model.virtual_pipeline_model_parallel_size}: leave the virtual stages out"
        )
    if config.peft is not None:
        yield (
            f"distill.hidden_layers with peft={type(config.peft).__name__}: an adapter checkpoint cannot hold "
            "the trained projection, learn from logits only"
        )


def _cache(distill: DistillConfig, config: RunConfig) -> Iterator[str]:
    if distill.cache is None:
        return
    if distill.top_k is None:
        yield "distill.cache holds only the most likely tokens: set distill.top_k to the cache's value"
    if distill.hidden_layers:
        yield "distill.cache holds no hidden states: unset distill.hidden_layers, or let the teacher run"
    if getattr(config.dataset, "padding_free", False):
        yield "distill.cache with dataset.padding_free=True: rows must have equal length, pad or pack them"


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
