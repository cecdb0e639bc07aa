# SPDX-License-Identifier: Apache-2.0
"""Rules on models with a head, and on adapters."""

from collections.abc import Iterator

from megatron.bridge.data.config import (
    ClassificationDatasetConfig,
    EmbeddingDatasetConfig,
    RecordDatasetConfig,
    RewardDatasetConfig,
    TokenClassificationDatasetConfig,
)
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
