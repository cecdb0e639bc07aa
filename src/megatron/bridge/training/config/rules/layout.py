# SPDX-License-Identifier: Apache-2.0
"""Rules on the parallel layout: the parallel sizes divide what they split."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from megatron.bridge.backends.attention.context_parallel import repeats_for_heads
from megatron.bridge.backends.attention.torch_attention import CP_KINDS, RING_KINDS
from megatron.bridge.backends.specs.layer_specs import resolve_backend
from megatron.bridge.training.config.batch_size import evaluation_batch
from megatron.bridge.training.config.rules.stages import SPLIT, given
from megatron.bridge.training.config.rules.values import (
    indivisible,
    multiple_near,
    near,
    unmet,
    value_of,
)
from megatron.bridge.training.config.run_config import RunConfig

_TENSOR = "model.tensor_model_parallel_size"
_SIZES = (
    *(
        "model.tensor_model_parallel_size",
        "model.pipeline_model_parallel_size",
        "model.context_parallel_size",
    ),
    *(
        "model.expert_model_parallel_size",
        "model.num_layers",
        "model.hidden_size",
        "model.num_attention_heads",
    ),
    *("model.make_query_groups_divisible_by", "train.micro_batch_size", "train.global_batch_size"),
    "logger.log_interval",
)


def sizes_are_positive(config: RunConfig, world_size: int) -> Iterator[str]:
    """Other values are divided by these."""
    train = config.train
    sizes = {key: value_of(config, key) for key in _SIZES}
    if train.num_epochs is None:
        sizes["train.train_iters"] = (
            train.train_iters if train.train_samples is None else train.train_samples
        )
    wrong = [f"{key}={value}" for key, value in sizes.items() if not value or value < 1]
    if wrong:
        yield f"{', '.join(wrong)}: must be at least 1"


def world_size_fits_layout(config: RunConfig, world_size: int) -> Iterator[str]:
    """The processes hold whole replicas of the model."""
    model = config.model
    tensor = model.tensor_model_parallel_size
    context = model.context_parallel_size
    stages = model.pipeline_model_parallel_size
    ranks = tensor * stages * context
    if ranks > 0 and world_size % ranks:
        yield (
            f"{_TENSOR}={tensor} x pipeline_model_parallel_size={stages} x context_parallel_size={context} needs "
            f"{ranks} processes or a multiple, but there are {world_size}: start "
            f"{multiple_near(world_size, ranks)} or lower a size"
        )


def groups_divide_heads(config: RunConfig, world_size: int) -> Iterator[str]:
    """Every query group serves the same number of heads."""
    heads, groups = config.model.unpadded_heads
    yield from indivisible("model.num_query_groups", groups, "model.num_attention_heads", heads)


def tp_divides_heads(config: RunConfig, world_size: int) -> Iterator[str]:
    """Each tensor-parallel rank gets whole heads."""
    size = config.model.tensor_model_parallel_size
    heads = config.model.padded_heads[0]
    padded = f", or pad the heads with model.make_query_groups_divisible_by={size}"
    yield from indivisible(_TENSOR, size, "model.num_attention_heads", heads, padded)


def tp_fits_query_groups(config: RunConfig, world_size: int) -> Iterator[str]:
    """Each rank holds whole query groups, or several ranks share one."""
    tp = config.model.tensor_model_parallel_size
    groups = config.model.padded_heads[1]
    if groups % tp and tp % groups:
        legal = [
            size for size in range(1, 2 * groups + 1) if groups % size == 0 or size % groups == 0
        ]
        yield (
            f"{_TENSOR}={tp} neither divides nor is a multiple of model.num_query_groups={groups}: use "
            f"{near(tp, legal)}"
        )


def tp_divides_ffn(config: RunConfig, world_size: int) -> Iterator[str]:
    """The feed-forward layer is split into equal parts."""
    model = config.model
    width = model.ffn_hidden_size or 4 * model.hidden_size
    yield from indivisible(
        _TENSOR, model.tensor_model_parallel_size, "model.ffn_hidden_size", width
    )


def tp_divides_vocabulary(config: RunConfig, world_size: int) -> Iterator[str]:
    """The embedding is split into equal parts."""
    model = config.model
    size = config.model.tensor_model_parallel_size
    if model.vocab_size is not None and model.padded_vocab_size % size:
        yield (
            f"{_TENSOR}={size} does not divide the vocabulary of {model.padded_vocab_size}: set "
            "model.should_pad_vocab=true"
        )


def sp_divides_sequence(config: RunConfig, world_size: int) -> Iterator[str]:
    """Each rank holds an equal part of the sequence."""
    model = config.model
    length = config.dataset.seq_length
    parts = model.tensor_model_parallel_size * model.context_parallel_size
    if model.sequence_parallel and length % parts:
        yield (
            f"dataset.seq_length={length} is not a multiple of tensor x context parallel size = {parts}, which "
            f"model.sequence_parallel needs: use {multiple_near(length, parts)}"
        )


def pp_divides_layers(config: RunConfig, world_size: int) -> Iterator[str]:
    """Pipeline stages are equal unless their sizes are set."""
    model = config.model
    virtual = config.model.virtual_pipeline_model_parallel_size
    key = "model.pipeline_model_parallel_size" + (
        " x virtual_pipeline_model_parallel_size" if virtual else ""
    )
    stages = model.pipeline_model_parallel_size * (virtual or 1)
    ends = "the sizes of the first and last stage"
    if not (given(model, SPLIT) or getattr(model, "has_own_stages", False)):
        yield from indivisible(
            key, stages, "model.num_layers", model.num_layers, f", or give {ends}"
        )


def vp_fits_microbatches(config: RunConfig, world_size: int) -> Iterator[str]:
    """The interleaved schedule works on groups of microbatches, one per stage."""
    model = config.model
    stages = model.pipeline_model_parallel_size
    group = model.microbatch_group_size_per_vp_stage or stages
    if model.virtual_pipeline_model_parallel_size is None:
        return
    for batch in _batches(config):
        count, rest = divmod(batch.total, batch.micro * config.data_parallel_size(world_size))
        if rest or (stages <= group <= count and not 0 < count % group < stages):
            continue
        yield (
            f"{batch.total_key}={batch.total} gives {count} microbatches per rank, which virtual pipelining "
            f"over {stages} stages cannot interleave in groups of {group}: use "
            f"{multiple_near(count, stages)} microbatches"
        )


def cp_divides_sequence(config: RunConfig, world_size: int) -> Iterator[str]:
    """Each context-parallel rank holds one early and one late chunk, so that causal work is balanced."""
    size = config.model.context_parallel_size
    length = config.dataset.seq_length
    if size > 1 and length % (2 * size):
        yield (
            f"dataset.seq_length={length} is not a multiple of 2 x model.context_parallel_size = {2 * size}: use "
            f"{multiple_near(length, 2 * size)}"
        )


def cp_a2a_divides_heads(config: RunConfig, world_size: int) -> Iterator[str]:
    """All-to-all context parallelism exchanges sequence for heads."""
    tp = config.model.tensor_model_parallel_size
    cp = config.model.context_parallel_size
    if cp == 1 or "a2a" not in _cp_kinds(config):
        return
    heads, groups = (max(count // tp, 1) for count in config.model.padded_heads)
    if not _can_share_heads(config, groups, heads, cp):
        yield (
            f"model.cp_comm_type=a2a with model.context_parallel_size={cp} cannot share the {heads} query and "
            f"{groups} key heads of a tensor-parallel rank: use all_gather or a smaller size"
        )


def cp_comm_type_is_available(config: RunConfig, world_size: int) -> Iterator[str]:
    """Attention knows four communication types, of which some exclude other settings."""
    model = config.model
    kinds = _cp_kinds(config)
    if model.context_parallel_size == 1:
        return
    unknown = sorted(kinds - set(CP_KINDS))
    if unknown:
        yield f"model.cp_comm_type={', '.join(unknown)}: use one of {', '.join(CP_KINDS)}"
    rings = sorted(kinds & set(RING_KINDS))
    if rings and _on_torch(config) and model.attention_dropout > 0:
        yield (
            f"model.cp_comm_type={', '.join(rings)} with model.attention_dropout={model.attention_dropout}: a ring "
            "computes blocks again in the backward pass, set model.attention_dropout=0 or "
            "model.cp_comm_type=all_gather"
        )


def hierarchical_cp_has_two_levels(config: RunConfig, world_size: int) -> Iterator[str]:
    """Heads are exchanged within the first level, and keys and values travel around the second."""
    model = config.model
    size = config.model.context_parallel_size
    sizes = model.hierarchical_context_parallel_sizes
    key = "model.hierarchical_context_parallel_sizes"
    asked = size > 1 and "a2a+p2p" in _cp_kinds(config)
    if not sizes and not asked:
        return
    tp = model.tensor_model_parallel_size
    heads, groups = (max(count // tp, 1) for count in model.padded_heads)
    two_levels = sizes is not None and len(sizes) == 2 and math.prod(sizes) == size
    divides = bool(sizes) and _can_share_heads(config, groups, heads, sizes[0])
    needs = {
        "model.cp_comm_type=a2a+p2p": asked,
        f"two sizes whose product is model.context_parallel_size={size}": two_levels,
        f"a first size that divides the {groups} key heads of a tensor-parallel rank": divides,
    }
    yield from unmet(f"{key}={sizes}", needs)


def cp_with_masks_needs_per_token_loss(config: RunConfig, world_size: int) -> Iterator[str]:
    """With masked tokens, a mean over ranks of means over tokens is not the mean over tokens."""
    size = config.model.context_parallel_size
    if size > 1 and config.dataset.masks_tokens and not config.model.calculate_per_token_loss:
        yield (
            f"model.context_parallel_size={size} with masked losses needs model.calculate_per_token_loss=True: set it"
        )


def ep_divides_experts(config: RunConfig, world_size: int) -> Iterator[str]:
    """Each expert-parallel rank gets whole experts."""
    size = config.model.expert_model_parallel_size
    experts = config.model.num_moe_experts
    if experts:
        yield from indivisible(
            "model.expert_model_parallel_size", size, "model.num_moe_experts", experts
        )
    elif size > 1:
        yield f"model.expert_model_parallel_size={size} needs experts, but model.num_moe_experts is not set"


def tp_with_experts_needs_sp(config: RunConfig, world_size: int) -> Iterator[str]:
    """Without sequence parallelism, every tensor-parallel rank would dispatch the same tokens."""
    model = config.model
    if (
        model.num_moe_experts
        and model.tensor_model_parallel_size > 1
        and not model.sequence_parallel
    ):
        yield "model.sequence_parallel=False with experts and tensor parallelism: set model.sequence_parallel=true"


@dataclass(frozen=True)
class _Batch:
    """A batch of training or of evaluation, and the keys that set its sizes."""

    micro: int
    total: int
    micro_key: str
    total_key: str


def _batches(config: RunConfig) -> Iterator[_Batch]:
    """Yield the batch of training, and that of evaluation if it has other sizes."""
    train = config.train
    micro_key = "train.micro_batch_size"
    total_key = "train.global_batch_size"
    yield _Batch(train.micro_batch_size, train.global_batch_size, micro_key, total_key)
    validation = config.validation
    micro, total = evaluation_batch(config)
    if validation.eval_micro_batch_size is not None:
        micro_key = "validation.eval_micro_batch_size"
    if validation.eval_global_batch_size is not None:
        total_key = "validation.eval_global_batch_size"
    if (micro, total) != (train.micro_batch_size, train.global_batch_size):
        yield _Batch(micro, total, micro_key, total_key)


def replicas_divide_batch(config: RunConfig, world_size: int) -> Iterator[str]:
    """A global batch is a whole number of microbatches on every replica."""
    replicas = config.data_parallel_size(world_size)
    for batch in _batches(config):
        micro = batch.micro
        total = batch.total
        if total % (micro * replicas) == 0:
            continue
        smaller = ""
        if total % replicas == 0:
            smaller = f", or {batch.micro_key}={math.gcd(micro, total // replicas)}"
        yield (
            f"{batch.total_key}={total} is not a multiple of {batch.micro_key}={micro} x data parallel "
            f"size {replicas}: use {multiple_near(total, micro * replicas)}{smaller}"
        )


def _on_torch(config: RunConfig) -> bool:
    return resolve_backend(config.model.backend) == "torch"


def _can_share_heads(config: RunConfig, groups: int, heads: int, ranks: int) -> bool:
    """Return whether ``ranks`` can share query and key heads evenly; the torch backend may repeat the latter."""
    return (
        repeats_for_heads(groups, heads, ranks) is not None
        if _on_torch(config)
        else groups % ranks == 0
    )


def _cp_kinds(config: RunConfig) -> set[str]:
    kind = config.model.cp_comm_type
    return set(kind) if isinstance(kind, list) else {kind} if kind else set()
