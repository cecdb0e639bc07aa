# SPDX-License-Identifier: Apache-2.0
"""Rules on what a model learns: distillation, preference tuning, reinforcement learning, heads, and adapters."""

from collections.abc import Iterator

from megatron.bridge.backends.moe.router_replay import check_replay
from megatron.bridge.data.config import (
    ClassificationDatasetConfig,
    EmbeddingDatasetConfig,
    FinetuningDatasetConfig,
    PreferenceDatasetConfig,
    PromptDatasetConfig,
    RerankDatasetConfig,
    RewardDatasetConfig,
    TokenClassificationDatasetConfig,
)
from megatron.bridge.training.config.resolve.data import has_tower, tuning_parts
from megatron.bridge.training.config.run_config import RunConfig
from megatron.bridge.utils.errors import UserError

OF_HEADS = (
    ClassificationDatasetConfig,
    EmbeddingDatasetConfig,
    RerankDatasetConfig,
    RewardDatasetConfig,
    TokenClassificationDatasetConfig,
)


def head_fits_the_data(config: RunConfig, world_size: int) -> Iterator[str]:
    """Records of texts and classes are for the head that learns from them."""
    model = config.model
    classes = _datasets_for(config)
    names = " or ".join(dataset_class.__name__ for dataset_class in classes)
    for part in tuning_parts(config.dataset):
        if model.head is None and isinstance(part, OF_HEADS):
            yield f"dataset is a {type(part).__name__}, but model.head is not set: set it, or use other data"
        elif model.head is not None and not isinstance(part, classes):
            yield (
                f"model.head={model.head} with num_labels={model.num_labels} needs a dataset of "
                f"the class {names}, but dataset is a {type(part).__name__}: change one of them"
            )
        negatives = getattr(part, "negatives", model.hard_negatives)
        if negatives != model.hard_negatives:
            yield (
                f"model.hard_negatives={model.hard_negatives} and dataset.negatives={negatives} differ: leave the "
                "first unset"
            )


def _datasets_for(config: RunConfig) -> tuple[type, ...]:
    """Return the classes of data that the head of the model learns from."""
    model = config.model
    if model.head is None:
        return ()
    if model.head == "embedding":
        return (EmbeddingDatasetConfig,)
    if model.head == "token_classification":
        return (TokenClassificationDatasetConfig,)
    if model.num_labels == 1:
        return (RewardDatasetConfig, RerankDatasetConfig)
    return (ClassificationDatasetConfig,)


def adapters_leave_a_new_head_untrained(config: RunConfig, world_size: int) -> Iterator[str]:
    """With adapters, the base model is frozen, and a head that is not saved with them would stay random."""
    saved_modules: list[str] = getattr(config.peft, "modules_to_save", None) or []
    trained = any(name.endswith("output_layer") for name in saved_modules)
    if config.peft is not None and config.model.num_labels is not None and not trained:
        yield (
            f"model.head={config.model.head} with peft.modules_to_save={saved_modules}: the head would not be trained, "
            "add output_layer to peft.modules_to_save"
        )


def peft_settings_are_valid(config: RunConfig, world_size: int) -> Iterator[str]:
    """The PEFT method accepts its settings."""
    if config.peft is not None:
        yield from config.peft.problems()


def distill_settings_are_valid(config: RunConfig, world_size: int) -> Iterator[str]:
    """The tokens and the layers that are compared exist."""
    distill = config.distill
    layers = config.model.num_layers
    if distill is None:
        return
    vocabulary = config.model.vocab_size or float("inf")
    if distill.top_k is not None and not 0 < distill.top_k < vocabulary:
        yield f"distill.top_k={distill.top_k}: must lie between 1 and the vocabulary of {vocabulary}, or be unset"
    if distill.on_policy_fraction and not isinstance(config.dataset, FinetuningDatasetConfig):
        yield (
            f"distill.on_policy_fraction={distill.on_policy_fraction} needs prompts with answers: use a dataset for "
            "fine-tuning, or set it to 0"
        )
    for layer in distill.hidden_layers:
        if not 1 <= layer <= layers:
            yield f"distill.hidden_layers: the student has layers 1 to {layers}, not {layer}"


def preference_data_goes_with_dpo(config: RunConfig, world_size: int) -> Iterator[str]:
    """Pairs of answers are for preference tuning, and it needs them."""
    pairs = isinstance(config.dataset, PreferenceDatasetConfig) and not isinstance(
        config.dataset, OF_HEADS
    )
    if config.dpo is not None and not pairs:
        yield (
            f"dpo learns from pairs of answers, but dataset is a {type(config.dataset).__name__}: use a "
            f"PreferenceDatasetConfig"
        )
    if pairs and config.dpo is None:
        yield "dataset is a PreferenceDatasetConfig, but dpo is not set: set it, or use a FinetuningDatasetConfig"


def labeled_answers_go_with_kto(config: RunConfig, world_size: int) -> Iterator[str]:
    """KTO learns from single answers, and estimates KL from several of them."""
    dpo = config.dpo
    kto = dpo is not None and dpo.loss_type == "kto"
    labeled = getattr(config.dataset, "labeled", None)
    if labeled is not None and labeled != kto:
        loss_types = "kto" if labeled else "sigmoid, ipo, hinge, cpo, simpo or orpo"
        yield f"dataset.labeled={labeled} goes with dpo.loss_type {loss_types}: leave dataset.labeled unset"
    if dpo is not None and kto and dpo.rpo_alpha is not None:
        yield (
            f"dpo.rpo_alpha={dpo.rpo_alpha} adds the likelihood of chosen answers, and dpo.loss_type=kto has no "
            "pairs: unset it"
        )
    micro = config.train.micro_batch_size
    replicas = config.data_parallel_size(world_size)
    if kto and micro * replicas < 2:
        yield (
            f"train.micro_batch_size={micro} with data parallel size {replicas} and dpo.loss_type=kto: one answer "
            "is too little to estimate KL, use a micro_batch_size of 2 or more"
        )


def prompts_go_with_grpo(config: RunConfig, world_size: int) -> Iterator[str]:
    """Prompts without answers are for reinforcement learning, and it needs them."""
    has_prompts = isinstance(config.dataset, PromptDatasetConfig)
    if config.grpo is not None and not has_prompts:
        yield (
            f"grpo learns from prompts, but dataset is a {type(config.dataset).__name__}: use a PromptDatasetConfig"
        )
    if has_prompts and config.grpo is None:
        yield "dataset is a PromptDatasetConfig, but grpo is not set: set it, or use a FinetuningDatasetConfig"
    if config.grpo is not None and has_tower(config):
        yield "grpo generates text only, and the model has a vision tower: use a text model"


def completions_make_whole_groups(config: RunConfig, world_size: int) -> Iterator[str]:
    """The completions of a generation are groups of ``num_generations``, and fit into a row."""
    grpo = config.grpo
    if grpo is None:
        return
    count = config.train.global_batch_size * grpo.steps_per_generation
    if count % grpo.num_generations:
        steps = f" and grpo.steps_per_generation={grpo.steps_per_generation}"
        nearest = max(1, round(count / grpo.num_generations)) * grpo.num_generations
        yield (
            f"train.global_batch_size={config.train.global_batch_size}"
            f"{steps if grpo.steps_per_generation > 1 else ''}: {count} completions of a generation cannot be divided "
            f"into groups of grpo.num_generations={grpo.num_generations}: change one of them, for example to "
            f"{nearest} completions"
        )
    length = config.dataset.seq_length
    if grpo.max_completion_length >= length:
        yield (
            f"grpo.max_completion_length={grpo.max_completion_length} leaves no room for prompts in "
            f"dataset.seq_length={length}: increase dataset.seq_length and model.seq_length, or lower "
            "max_completion_length"
        )


def adapters_can_have_the_engines_numbers(config: RunConfig, world_size: int) -> Iterator[str]:
    """The engine generates without dropout."""
    dropout = getattr(config.peft, "dropout", 0.0)
    if config.grpo is not None and config.grpo.exact_rollout and dropout:
        yield (
            f"grpo.exact_rollout=True does not work with peft.dropout={dropout}: set peft.dropout=0, or switch "
            "exact_rollout off"
        )


def experts_can_be_replayed(config: RunConfig, world_size: int) -> Iterator[str]:
    """Routers choose given experts; passes with the engine's numbers give them the engine's."""
    grpo = config.grpo
    model = config.model
    if grpo is None:
        return
    if grpo.router_replay and not model.num_moe_experts:
        yield "grpo.router_replay=True, but the model has no experts: leave it out"
    if not model.num_moe_experts or not (grpo.router_replay or grpo.exact_rollout):
        return
    purpose = "grpo.router_replay=True" if grpo.router_replay else "grpo.exact_rollout=True"
    try:
        check_replay(model, purpose)
    except UserError as error:
        yield str(error)


def adapters_can_be_switched_off(config: RunConfig, world_size: int) -> Iterator[str]:
    """Without a separate reference, a run with adapters is compared with its base."""
    compares: dict[str, bool] = {
        "dpo": config.dpo is not None
        and config.dpo.reference is None
        and config.dpo.needs_reference,
        "grpo": config.grpo is not None and config.grpo.reference is None and config.grpo.beta > 0,
    }
    for block in [name for name, is_compared in compares.items() if is_compared]:
        if getattr(config.peft, "modules_to_save", None):
            yield (
                f"{block}.reference is not set, and peft.modules_to_save trains weights of the base in place: set "
                f"{block}.reference to the weights that the run starts from"
            )
