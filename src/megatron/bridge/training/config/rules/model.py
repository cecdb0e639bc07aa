# SPDX-License-Identifier: Apache-2.0
"""Rules on what the model computes, and on the rows that it gets."""

from collections.abc import Iterator

import torch.nn.functional as F

from megatron.bridge.data.energon import EnergonProvider
from megatron.bridge.models.mamba_provider import MambaModelProvider
from megatron.bridge.training.config.resolve.data import has_tower, sequence_multiple, tuning_parts
from megatron.bridge.training.config.rules.values import indivisible
from megatron.bridge.training.config.run_config import RunConfig
from megatron.bridge.utils.errors import UserError


def hybrid_pattern_is_valid(config: RunConfig, world_size: int) -> Iterator[str]:
    """The pattern of a hybrid model has a known symbol for each layer."""
    if isinstance(config.model, MambaModelProvider):
        try:
            config.model.check_pattern()
        except UserError as error:
            yield f"model.{error}"


def layer_features_fit(config: RunConfig, world_size: int) -> Iterator[str]:
    """Features of layers exclude some settings, and need sizes that ranks can split (``models.features``)."""
    try:
        problems = list(config.model.feature_problems())
    except UserError as error:
        problems = [str(error)]
    for problem in problems:
        yield f"model: {problem}"


def heads_divide_width(config: RunConfig, world_size: int) -> Iterator[str]:
    """Heads divide the hidden size, unless ``kv_channels`` sets their size."""
    model = config.model
    if model.kv_channels is None and not model.multi_latent_attention:
        heads = model.unpadded_heads[0]
        also = ", or set model.kv_channels"
        yield from indivisible(
            "model.num_attention_heads", heads, "model.hidden_size", model.hidden_size, also
        )


def rotary_width_is_even(config: RunConfig, world_size: int) -> Iterator[str]:
    """Rotary embedding rotates pairs, so the rotated part of a head is even."""
    model = config.model
    if (
        getattr(model, "position_embedding_type", "rope") not in ("rope", "mrope")
        or model.multi_latent_attention
    ):
        return
    head = model.kv_channels or model.hidden_size // model.unpadded_heads[0]
    percent = model.rotary_percent
    turned = int(head * percent)
    if turned % 2:
        yield (
            f"model.kv_channels={head} and model.rotary_percent={percent} rotate {turned} dimensions of a head, "
            f"which must be even: use model.kv_channels={head + 1}"
        )


def exact_gelu_is_not_fused(config: RunConfig, world_size: int) -> Iterator[str]:
    """Megatron-Core's fused GELU is the tanh approximation, which differs by up to 5e-4."""
    if config.model.bias_activation_fusion and config.model.activation_func is F.gelu:
        yield (
            "model.bias_activation_fusion=True computes GELU by its tanh approximation, and model.activation_func="
            "torch.nn.functional.gelu is the exact one: set model.bias_activation_fusion=false"
        )


def sequence_fits_model(config: RunConfig, world_size: int) -> Iterator[str]:
    """The model has no trained positions beyond its sequence length."""
    length = config.dataset.seq_length
    limit = config.model.seq_length
    if length > limit:
        yield (
            f"dataset.seq_length={length} is longer than model.seq_length={limit}: lower it to {limit}, or raise "
            "model.seq_length"
        )


def packed_samples_need_micro_batch_of_one(config: RunConfig, world_size: int) -> Iterator[str]:
    """Attention over packed samples takes one row at a time."""
    micro = config.train.micro_batch_size
    if micro > 1 and any(part.packed for part in tuning_parts(config.dataset)):
        yield (
            f"train.micro_batch_size={micro} with packed samples: a packed row already holds several samples, so "
            f"set train.micro_batch_size=1 and lower train.global_batch_size, which counts rows"
        )


def packed_samples_fit_context_parallel(config: RunConfig, world_size: int) -> Iterator[str]:
    """Context parallelism splits each sample of a row into equal chunks."""
    for part in tuning_parts(config.dataset):
        needed = sequence_multiple(config, part.padding_free)
        if part.joins_samples and part.sequence_multiple % needed:
            yield (
                f"dataset.packed_sequence_specs.pad_seq_to_mult={part.sequence_multiple} is no multiple of "
                f"{needed}, which the context and sequence parallel layout needs: leave it unset, or use {needed}"
            )


def images_need_a_vision_tower(config: RunConfig, world_size: int) -> Iterator[str]:
    """Only a model with a vision tower learns from images."""
    for part in tuning_parts(config.dataset):
        if part.hf_processor_path is not None and not has_tower(config):
            yield (
                f"dataset.hf_processor_path={part.hf_processor_path}, but the model has no vision tower: train a "
                "vision-language model, or leave it unset"
            )
        for name in ("media_root", "min_pixels", "max_pixels", "max_image_tokens"):
            if part.hf_processor_path is None and (value := getattr(part, name)) is not None:
                yield (
                    f"dataset.{name}={value} has no effect, because no image processor is used: leave it unset, "
                    "or train a vision-language model whose folder has a preprocessor_config.json"
                )


def energon_readers_fit_batch(config: RunConfig, world_size: int) -> Iterator[str]:
    """Each step reads the same number of samples from every reader, under any layout."""
    if not isinstance(config.dataset, EnergonProvider) or config.dataset.readers is None:
        return
    readers = config.dataset.readers
    batch = config.train.global_batch_size
    ranks = config.data_parallel_size(world_size)
    if readers < 1 or readers % ranks or batch % readers:
        yield (
            f"dataset.readers={readers} must be a multiple of the data parallel size {ranks} and divide "
            f"train.global_batch_size={batch}: leave it unset, or change one of the three"
        )
