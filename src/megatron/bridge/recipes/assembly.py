# SPDX-License-Identifier: Apache-2.0
"""Assemble a config from a model and all options of a recipe."""

from typing import Any

import torch

from megatron.bridge.data.config import (
    DatasetConfig,
    FinetuningDatasetConfig,
    GPTDatasetConfig,
    MockAudioConversationProvider,
    MockGPTDatasetConfig,
    MockVLMConversationProvider,
)
from megatron.bridge.data.finetuning.sft_config import HFDatasetConfig, is_read_by_datasets
from megatron.bridge.data.tokenizer import TokenizerConfig
from megatron.bridge.models.features.multi_token_prediction import drop_mtp_layers
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.recipes.defaults import default_peft_config
from megatron.bridge.recipes.options import Recompute, layout
from megatron.bridge.recipes.sizes import CheckpointSize, Size, VisionSize
from megatron.bridge.training.config import (
    CheckpointConfig,
    ConfigContainer,
    DistributedDataParallelConfig,
    LoggerConfig,
    OptimizerConfig,
    RNGConfig,
    SchedulerConfig,
    TrainingConfig,
    ValidationConfig,
)


def pretrain_config(size: Size, options: dict[str, Any]) -> ConfigContainer:
    """Return the config of pretraining.

    Args:
        size: The model.
        options: Values of ``PretrainOptions``, defaults included.
    """
    data_paths = options["data_paths"]
    has_tower = isinstance(size, VisionSize)
    if data_paths is None:
        dataset = _mock_data(options, size)
    else:
        dataset = GPTDatasetConfig(
            seq_length=options["seq_length"],
            blend=(data_paths, None),
            split=options["split"],
            random_seed=options["seed"],
        )
    mock = data_paths is None and not has_tower  # images and audio need the model's own tokenizer
    return _assemble(size, options, dataset, weight_decay=0.1, mock=mock)


def finetune_config(size: Size, options: dict[str, Any]) -> ConfigContainer:
    """Return the config of fine-tuning.

    Args:
        size: The model.
        options: Values of ``FinetuneOptions``, defaults included.
    """
    mock = options["dataset_root"] is None and not isinstance(size, VisionSize)
    dataset = _tuning_data(options, size)
    config = _assemble(size, options, dataset, weight_decay=0.01, mock=mock)
    weights = options["pretrained_checkpoint"] or options["hf_model"]
    config.checkpoint.pretrained_checkpoint = weights
    if options["peft"] is not None:
        config.peft = default_peft_config(options["peft"], config.model)
    return config


def _tuning_data(options: dict[str, Any], size: Size) -> DatasetConfig:
    root = options["dataset_root"]
    if root is None:
        return _mock_data(options, size)
    seq_length = options["seq_length"]
    seed = options["seed"]
    if is_read_by_datasets(root):
        return HFDatasetConfig(seq_length=seq_length, dataset_name=root, seed=seed)
    return FinetuningDatasetConfig(seq_length=seq_length, dataset_root=root, seed=seed)


def _mock_data(options: dict[str, Any], size: Size) -> DatasetConfig:
    seq_length = options["seq_length"]
    seed = options["seed"]
    if isinstance(size, VisionSize):
        provider = (
            MockAudioConversationProvider if size.takes_audio else MockVLMConversationProvider
        )
        return provider(seq_length=seq_length, seed=seed, random_seed=seed)
    return MockGPTDatasetConfig(seq_length=seq_length, random_seed=seed)


def _assemble(
    size: Size, options: dict[str, Any], dataset: Any, weight_decay: float, mock: bool
) -> ConfigContainer:
    if options["hf_model"] is not None:
        size = CheckpointSize(options["hf_model"], numbers={}, published=False)
    model = _model(size, options)
    return ConfigContainer(
        model=model,
        train=TrainingConfig(
            train_iters=options["train_iters"],
            global_batch_size=options["global_batch_size"],
            micro_batch_size=options["micro_batch_size"],
            # garbage collection on one rank makes the others wait, so all ranks collect at the same step
            manual_gc=True,
            manual_gc_interval=100,
        ),
        validation=ValidationConfig(
            eval_interval=options["eval_interval"], eval_iters=options["eval_iters"]
        ),
        optimizer=OptimizerConfig(
            optimizer="adam",
            lr=options["lr"],
            min_lr=options["min_lr"],
            weight_decay=weight_decay,
            adam_beta1=0.9,
            adam_beta2=0.95,
            adam_eps=1e-8,
            clip_grad=1.0,
        ),
        # a fraction, so that a shortened run keeps its warmup and its schedule
        scheduler=SchedulerConfig(
            lr_decay_style="cosine", lr_warmup_fraction=options["warmup_fraction"]
        ),
        ddp=DistributedDataParallelConfig(
            use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True
        ),
        dataset=dataset,
        tokenizer=_tokenizer(size, options, model, mock),
        checkpoint=CheckpointConfig(
            save=options["dir"], save_interval=options["dir"] and options["save_interval"]
        ),
        logger=LoggerConfig(),
        rng=RNGConfig(seed=options["seed"]),
        mixed_precision=options["precision"],
    )


def _model(size: Size, options: dict[str, Any]) -> GPTModelProvider:
    model = size.provider()
    model.seq_length = options["seq_length"]
    for option in layout():
        setattr(model, option, options[option])
    model.sequence_parallel = options.get("sequence_parallel", model.tensor_model_parallel_size > 1)
    model.account_for_embedding_in_pipeline_split = options["embedding_and_loss_are_layers"]
    model.account_for_loss_in_pipeline_split = options["embedding_and_loss_are_layers"]
    model.pipeline_model_parallel_layout = options["pipeline_layout"]
    if not model.mtp_num_layers:  # the layout is for a size that may have MTP layers
        drop_mtp_layers(model)
    _recompute(model, options["recompute"])
    # the fused SwiGLU keeps only its input for the backward pass; the unfused one keeps three more tensors
    model.bias_activation_fusion = (
        model.gated_linear_unit and model.activation_func is torch.nn.functional.silu
    )
    return model


def _recompute(model: Any, recompute: Recompute | None) -> None:
    if isinstance(recompute, list) and "vision_model" in recompute:
        model.recompute_vision_model = True
        recompute = [module for module in recompute if module != "vision_model"] or None
    if recompute == "full":
        model.recompute_granularity = "full"
        model.recompute_method = "uniform"
        model.recompute_num_layers = 1
    elif recompute is not None:
        model.recompute_granularity = "selective"
        model.recompute_modules = ["core_attn"] if recompute == "selective" else [*recompute]


def _tokenizer(
    size: Size, options: dict[str, Any], model: GPTModelProvider, mock: bool
) -> TokenizerConfig:
    name = options["tokenizer"]
    if mock and name is None:
        return TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=model.vocab_size)
    return TokenizerConfig(
        tokenizer_type="HuggingFaceTokenizer", tokenizer_model=name or size.hub_id
    )
