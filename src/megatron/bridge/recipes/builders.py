# SPDX-License-Identifier: Apache-2.0
"""The builders behind all recipes.

``pretrain``, ``distill``, ``sft`` and ``dpo`` build a config from a size and options. ``pretrain_recipe``,
``distill_recipe``, ``finetune_recipe`` and ``dpo_recipe`` make recipes from them. The caller's options override
the recommended values of the recipe, which override the defaults in this file.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, Unpack

import torch

from megatron.bridge.data.config import (
    DatasetConfig,
    FinetuningDatasetConfig,
    GPTDatasetConfig,
    MockGPTDatasetConfig,
    MockVLMConversationProvider,
    PreferenceDatasetConfig,
)
from megatron.bridge.data.finetuning.sft_config import HFDatasetConfig, is_read_by_datasets
from megatron.bridge.data.tokenizer import TokenizerConfig
from megatron.bridge.models.gpt_provider import GPTModelProvider, drop_mtp_layers
from megatron.bridge.recipes.defaults import default_peft_config
from megatron.bridge.recipes.options import (
    FinetuneOptions,
    LayoutOptions,
    PretrainOptions,
    Recompute,
    ScheduleOptions,
    layout,
)
from megatron.bridge.recipes.sizes import CheckpointSize, Size, VisionSize, sized
from megatron.bridge.training.config import (
    CheckpointConfig,
    ConfigContainer,
    DistillConfig,
    DistributedDataParallelConfig,
    DPOConfig,
    LoggerConfig,
    OptimizerConfig,
    RNGConfig,
    SchedulerConfig,
    TrainingConfig,
    ValidationConfig,
)
from megatron.bridge.utils.errors import UserError, did_you_mean

LAYOUT: LayoutOptions = {
    **layout(),
    "embedding_and_loss_are_layers": False,
    "pipeline_layout": None,
    "recompute": None,
}

SCHEDULE: ScheduleOptions = {
    "micro_batch_size": 1,
    "eval_iters": 10,
    "precision": "bf16_mixed",
    "seed": 1234,
    "dir": None,
    "tokenizer": None,
    "hf_model": None,
}

PRETRAIN: PretrainOptions = {
    **LAYOUT,
    **SCHEDULE,
    "train_iters": 250_000,
    "global_batch_size": 512,
    "min_lr": 3e-6,
    "warmup_fraction": 0.01,
    "eval_interval": 1000,
    "save_interval": 1000,
    "data_paths": None,
    "split": "9990,8,2",
}

FINETUNE: FinetuneOptions = {
    **LAYOUT,
    **SCHEDULE,
    "seq_length": 4096,
    "train_iters": 1000,
    "global_batch_size": 128,
    "lr": 5e-6,
    "min_lr": 0.0,
    "warmup_fraction": 0.05,
    "eval_interval": 100,
    "save_interval": 100,
    "pretrained_checkpoint": None,
    "dataset_root": None,
    "peft": None,
}

# Adapters start from zero and tolerate a higher rate than pretrained weights.
ADAPTERS: FinetuneOptions = {"lr": 1e-4}

# from Zephyr and its recipe with adapters (https://arxiv.org/abs/2310.16944)
DPO: FinetuneOptions = {"lr": 5e-7, "warmup_fraction": 0.1, "seq_length": 4096}
DPO_ADAPTERS: FinetuneOptions = {"lr": 5e-6}


def pretrain(
    size: Size | str,
    options: PretrainOptions,
    *shared: LayoutOptions | PretrainOptions,
    **recommended: Unpack[PretrainOptions],
) -> ConfigContainer:
    """Return the config that trains ``size`` from random weights.

    Args:
        size: The model, or its hub id if its published config is in the package.
        options: The caller's options.
        *shared: Recommended values that several recipes share; later ones override earlier ones.
        **recommended: Recommended values of this recipe; they override the shared ones.

    Raises:
        UserError: ``options`` has a key that is not in ``PretrainOptions``.
    """
    size, chosen = sized(size), _chosen(PretrainOptions, PRETRAIN, *shared, recommended, options)
    data_paths, with_images = chosen["data_paths"], isinstance(size, VisionSize)
    if data_paths is None:
        dataset = _mock_data(chosen, with_images)
    else:
        dataset = GPTDatasetConfig(
            seq_length=chosen["seq_length"],
            blend=(data_paths, None),
            split=chosen["split"],
            random_seed=chosen["seed"],
        )
    mock = data_paths is None and not with_images  # images need the model's own tokenizer
    return _assemble(size, chosen, dataset, weight_decay=0.1, mock=mock)


def distill(
    size: Size | str,
    options: PretrainOptions,
    teacher: Size | str,
    **recommended: Unpack[PretrainOptions],
) -> ConfigContainer:
    """Return the config that trains ``size`` from random weights on the data and on the logits of ``teacher``.

    Raises:
        UserError: ``options`` has a key that is not in ``PretrainOptions``.
    """
    config = pretrain(size, options, **recommended)
    config.distill = DistillConfig(teacher=sized(teacher).hub_id)
    return config


def sft(
    size: Size | str,
    options: FinetuneOptions,
    *shared: LayoutOptions | FinetuneOptions,
    **recommended: Unpack[FinetuneOptions],
) -> ConfigContainer:
    """Return the config that fine-tunes ``size``, or adapters on it, on prompts and completions.

    The arguments are the same as for ``pretrain``.

    Raises:
        UserError: ``options`` has a key that is not in ``FinetuneOptions``, or asks for an unknown adapter.
    """
    adapters: FinetuneOptions = {} if options.get("peft") is None else ADAPTERS
    chosen = _chosen(FinetuneOptions, FINETUNE, *shared, recommended, adapters, options)
    size = sized(size)
    with_images = isinstance(size, VisionSize)
    mock = chosen["dataset_root"] is None and not with_images
    config = _assemble(
        size, chosen, _tuning_data(chosen, with_images), weight_decay=0.01, mock=mock
    )
    config.checkpoint.pretrained_checkpoint = chosen["pretrained_checkpoint"] or chosen["hf_model"]
    if chosen["peft"] is not None:
        config.peft = default_peft_config(chosen["peft"], config.model)
    return config


def dpo(
    size: Size | str,
    options: FinetuneOptions,
    *shared: LayoutOptions | FinetuneOptions,
    **recommended: Unpack[FinetuneOptions],
) -> ConfigContainer:
    """Return the config that trains ``size``, or adapters on it, to prefer one of two answers.

    ``dataset_root`` is a folder of pairs, by default ``preferences`` in the current directory. The arguments are
    the same as for ``pretrain``.

    Raises:
        UserError: ``options`` has a key that is not in ``FinetuneOptions``, or asks for an unknown adapter.
    """
    adapters: FinetuneOptions = {} if options.get("peft") is None else DPO_ADAPTERS
    chosen: Any = _chosen(FinetuneOptions, FINETUNE, DPO, *shared, recommended, adapters, options)
    root = chosen["dataset_root"] or "preferences"  # pairs in the current directory
    chosen["dataset_root"] = root
    config = sft(size, chosen)
    train_on_preferences(config, root, chosen["seed"])
    return config


def train_on_preferences(config: ConfigContainer, dataset_root: str, seed: int) -> None:
    """Turn a config of fine-tuning into one of preference tuning, in place.

    Args:
        config: of any recipe for fine-tuning.
        dataset_root: folder of pairs.
        seed: of the order of the pairs.
    """
    config.dpo = DPOConfig()
    config.model.calculate_per_token_loss = True
    config.dataset = PreferenceDatasetConfig(
        seq_length=config.model.seq_length, dataset_root=dataset_root, seed=seed
    )


class PretrainRecipe(Protocol):
    """The interface of a recipe for training from random weights."""

    def __call__(self, **options: Unpack[PretrainOptions]) -> ConfigContainer: ...


class FinetuneRecipe(Protocol):
    """The interface of a recipe for fine-tuning."""

    def __call__(self, **options: Unpack[FinetuneOptions]) -> ConfigContainer: ...


def pretrain_recipe(
    size: Size | str,
    *shared: LayoutOptions | PretrainOptions,
    **recommended: Unpack[PretrainOptions],
) -> PretrainRecipe:
    """Make a recipe that returns ``pretrain(size, options, *shared, **recommended)`` for its caller's options."""
    return _recipe(pretrain, size, shared, recommended)


def distill_recipe(
    size: Size | str, teacher: Size | str, **recommended: Unpack[PretrainOptions]
) -> PretrainRecipe:
    """Make a recipe that returns ``distill(size, options, teacher, **recommended)`` for its caller's options."""
    return _recipe(distill, size, (teacher,), recommended)


def finetune_recipe(
    size: Size | str,
    *shared: LayoutOptions | FinetuneOptions,
    **recommended: Unpack[FinetuneOptions],
) -> FinetuneRecipe:
    """Make a recipe that returns ``sft(size, options, *shared, **recommended)`` for its caller's options."""
    return _recipe(sft, size, shared, recommended)


def dpo_recipe(
    size: Size | str,
    *shared: LayoutOptions | FinetuneOptions,
    **recommended: Unpack[FinetuneOptions],
) -> FinetuneRecipe:
    """Make a recipe that returns ``dpo(size, options, *shared, **recommended)`` for its caller's options."""
    return _recipe(dpo, size, shared, recommended)


def _recipe(
    build: Callable[..., ConfigContainer],
    size: Size | str,
    shared: tuple[Any, ...],
    recommended: Mapping[str, Any],
) -> Any:
    def recipe(**options: Any) -> ConfigContainer:
        return build(size, options, *shared, **recommended)

    return recipe


def _chosen(kind: Any, *layers: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the options, of which later ones override earlier ones, and check the keys, as Python does not."""
    chosen = {key: value for layer in layers for key, value in layer.items()}
    for key in chosen:
        if key not in kind.__annotations__:
            raise UserError(
                f"there is no recipe option {key}{did_you_mean(key, kind.__annotations__)}"
            )
    return chosen


def _tuning_data(chosen: dict[str, Any], with_images: bool) -> DatasetConfig:
    root, length, seed = chosen["dataset_root"], chosen["seq_length"], chosen["seed"]
    if root is not None:
        if is_read_by_datasets(root):
            return HFDatasetConfig(seq_length=length, dataset_name=root, seed=seed)
        return FinetuningDatasetConfig(seq_length=length, dataset_root=root, seed=seed)
    return _mock_data(chosen, with_images)


def _mock_data(chosen: dict[str, Any], with_images: bool) -> DatasetConfig:
    length, seed = chosen["seq_length"], chosen["seed"]
    if with_images:
        return MockVLMConversationProvider(seq_length=length, seed=seed, random_seed=seed)
    return MockGPTDatasetConfig(seq_length=length, random_seed=seed)


def _assemble(
    size: Size, chosen: dict[str, Any], dataset: Any, weight_decay: float, mock: bool
) -> ConfigContainer:
    if chosen["hf_model"] is not None:
        size = CheckpointSize(chosen["hf_model"], numbers={}, published=False)
    model = _model(size, chosen)
    return ConfigContainer(
        model=model,
        train=TrainingConfig(
            train_iters=chosen["train_iters"],
            global_batch_size=chosen["global_batch_size"],
            micro_batch_size=chosen["micro_batch_size"],
            # garbage collection on one rank makes the others wait, so all ranks collect at the same step
            manual_gc=True,
            manual_gc_interval=100,
        ),
        validation=ValidationConfig(
            eval_interval=chosen["eval_interval"], eval_iters=chosen["eval_iters"]
        ),
        optimizer=OptimizerConfig(
            optimizer="adam",
            lr=chosen["lr"],
            min_lr=chosen["min_lr"],
            weight_decay=weight_decay,
            adam_beta1=0.9,
            adam_beta2=0.95,
            adam_eps=1e-8,
            clip_grad=1.0,
        ),
        # a fraction, so that a shortened run keeps its warmup and its schedule
        scheduler=SchedulerConfig(
            lr_decay_style="cosine", lr_warmup_fraction=chosen["warmup_fraction"]
        ),
        ddp=DistributedDataParallelConfig(
            use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True
        ),
        dataset=dataset,
        tokenizer=_tokenizer(size, chosen, model, mock),
        checkpoint=CheckpointConfig(
            save=chosen["dir"], save_interval=chosen["dir"] and chosen["save_interval"]
        ),
        logger=LoggerConfig(),
        rng=RNGConfig(seed=chosen["seed"]),
        mixed_precision=chosen["precision"],
    )


def _model(size: Size, chosen: dict[str, Any]) -> GPTModelProvider:
    model = size.provider()
    for name in ("seq_length", *layout()):
        setattr(model, name, chosen[name])
    model.sequence_parallel = chosen.get("sequence_parallel", model.tensor_model_parallel_size > 1)
    model.account_for_embedding_in_pipeline_split = chosen["embedding_and_loss_are_layers"]
    model.account_for_loss_in_pipeline_split = chosen["embedding_and_loss_are_layers"]
    model.pipeline_model_parallel_layout = chosen["pipeline_layout"]
    if not model.mtp_num_layers:  # the layout is for a size that may have MTP layers
        drop_mtp_layers(model)
    _recompute(model, chosen["recompute"])
    # the fused SwiGLU keeps only its input for the backward pass; the unfused one keeps three more tensors
    model.bias_activation_fusion = (
        model.gated_linear_unit and model.activation_func is torch.nn.functional.silu
    )
    return model


def _recompute(model: Any, what: Recompute | None) -> None:
    if isinstance(what, list) and "vision_model" in what:
        model.recompute_vision_model = True
        what = [module for module in what if module != "vision_model"] or None
    if what == "full":
        model.recompute_granularity, model.recompute_method, model.recompute_num_layers = (
            "full",
            "uniform",
            1,
        )
    elif what is not None:
        model.recompute_granularity = "selective"
        model.recompute_modules = ["core_attn"] if what == "selective" else [*what]


def _tokenizer(
    size: Size, chosen: dict[str, Any], model: GPTModelProvider, mock: bool
) -> TokenizerConfig:
    name = chosen["tokenizer"]
    if mock and name is None:
        return TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=model.vocab_size)
    return TokenizerConfig(
        tokenizer_type="HuggingFaceTokenizer", tokenizer_model=name or size.hub_id
    )
