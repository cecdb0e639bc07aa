# SPDX-License-Identifier: Apache-2.0
"""Rules on the parallel layout: the parallel sizes divide what they split."""

from megatron.bridge.backends.attention.context_parallel import repeats_for_heads
from megatron.bridge.backends.specs.layer_specs import resolve_backend
from megatron.bridge.training.config.rules.nearest_values import divisors, multiple_near, near
from megatron.bridge.training.config.run_config import RunConfig


def sizes_are_positive(config: RunConfig, world_size: int) -> str | None:
    """Other values are divided by these."""
    model, train = config.model, config.train
    sizes = {
        "model.tensor_model_parallel_size": model.tensor_model_parallel_size,
        "model.pipeline_model_parallel_size": model.pipeline_model_parallel_size,
        "model.context_parallel_size": model.context_parallel_size,
        "model.expert_model_parallel_size": model.expert_model_parallel_size,
        "model.num_layers": model.num_layers,
        "model.hidden_size": model.hidden_size,
        "model.num_attention_heads": model.num_attention_heads,
        "model.make_query_groups_divisible_by": model.make_query_groups_divisible_by,
        "train.micro_batch_size": train.micro_batch_size,
        "train.global_batch_size": train.global_batch_size,
        "train.train_iters": train.train_samples if train.train_samples is not None else train.train_iters,
        "logger.log_interval": config.logger.log_interval,
    }
    wrong = [f"{key}={value}" for key, value in sizes.items() if not value or value < 1]
    return f"{', '.join(wrong)}: must be at least 1" if wrong else None


def world_size_fits_layout(config: RunConfig, world_size: int) -> str | None:
    """The processes hold whole replicas of the model."""
    model = config.model
    ranks = model.tensor_model_parallel_size * model.pipeline_model_parallel_size * model.context_parallel_size
    if ranks < 1 or world_size % ranks == 0:
        return None
    return (
        f"model.tensor_model_parallel_size={model.tensor_model_parallel_size} x "
        f"pipeline_model_parallel_size={model.pipeline_model_parallel_size} x "
        f"context_parallel_size={model.context_parallel_size} needs {ranks} processes or a multiple, "
        f"but there are {world_size}: start {multiple_near(world_size, ranks)} or lower a size"
    )


def groups_divide_heads(config: RunConfig, world_size: int) -> str | None:
    """Every query group serves the same number of heads."""
    heads, groups = config.model.unpadded_heads
    if heads % groups == 0:
        return None
    return (
        f"model.num_query_groups={groups} does not divide model.num_attention_heads={heads}: use "
        f"{near(groups, divisors(heads))}"
    )


def tp_divides_heads(config: RunConfig, world_size: int) -> str | None:
    """Each tensor-parallel rank gets whole heads."""
    tp, heads = config.model.tensor_model_parallel_size, config.model.padded_heads[0]
    sentence = _divides_tp(config, "num_attention_heads", heads)
    return sentence and f"{sentence}, or pad the heads with model.make_query_groups_divisible_by={tp}"


def tp_fits_query_groups(config: RunConfig, world_size: int) -> str | None:
    """Each rank holds whole query groups, or several ranks share one."""
    model = config.model
    tp, groups = model.tensor_model_parallel_size, model.padded_heads[1]
    if groups % tp == 0 or tp % groups == 0:
        return None
    legal = [size for size in range(1, 2 * groups + 1) if groups % size == 0 or size % groups == 0]
    return (
        f"model.tensor_model_parallel_size={tp} neither divides nor is a multiple of "
        f"model.num_query_groups={groups}: use {near(tp, legal)}"
    )


def tp_divides_ffn(config: RunConfig, world_size: int) -> str | None:
    """The feed-forward layer is split into equal parts."""
    model = config.model
    return _divides_tp(config, "ffn_hidden_size", model.ffn_hidden_size or 4 * model.hidden_size)


def tp_divides_vocabulary(config: RunConfig, world_size: int) -> str | None:
    """The embedding is split into equal parts."""
    model = config.model
    if model.vocab_size is None or model.padded_vocab_size % model.tensor_model_parallel_size == 0:
        return None
    return (
        f"model.tensor_model_parallel_size={model.tensor_model_parallel_size} does not divide the vocabulary of "
        f"{model.padded_vocab_size}: set model.should_pad_vocab=true"
    )


def sp_needs_tp(config: RunConfig, world_size: int) -> str | None:
    """Sequence parallelism splits the sequence over the tensor-parallel ranks."""
    model = config.model
    if not model.sequence_parallel or model.tensor_model_parallel_size > 1:
        return None
    return (
        "model.sequence_parallel=True needs model.tensor_model_parallel_size > 1, which is 1: raise it, "
        "or switch sequence_parallel off"
    )


def sp_divides_sequence(config: RunConfig, world_size: int) -> str | None:
    """Each rank holds an equal part of the sequence."""
    model, length = config.model, config.dataset.seq_length
    parts = model.tensor_model_parallel_size * model.context_parallel_size
    if not model.sequence_parallel or length % parts == 0:
        return None
    return (
        f"dataset.seq_length={length} is not a multiple of tensor x context parallel size = {parts}, which "
        f"model.sequence_parallel needs: use {multiple_near(length, parts)}"
    )


def pp_divides_layers(config: RunConfig, world_size: int) -> str | None:
    """Pipeline stages are equal unless their sizes are set."""
    model = config.model
    stages = model.pipeline_model_parallel_size * (model.virtual_pipeline_model_parallel_size or 1)
    if _has_own_split(config) or model.num_layers % stages == 0:
        return None
    virtual = model.virtual_pipeline_model_parallel_size
    key = "pipeline_model_parallel_size" + (" x virtual_pipeline_model_parallel_size" if virtual else "")
    legal = divisors(model.num_layers)
    return (
        f"model.{key}={stages} does not divide model.num_layers={model.num_layers}: use {near(stages, legal)}, "
        "or give the sizes of the first and last stage"
    )


def vp_needs_pp(config: RunConfig, world_size: int) -> str | None:
    """Virtual stages need a pipeline to interleave."""
    model = config.model
    virtual = model.virtual_pipeline_model_parallel_size
    if virtual is None or (virtual > 1 and model.pipeline_model_parallel_size > 1):
        return None
    return (
        f"model.virtual_pipeline_model_parallel_size={virtual} with "
        f"pipeline_model_parallel_size={model.pipeline_model_parallel_size}: virtual stages need at least 2 of "
        "each, or leave the virtual size unset"
    )


def vp_fits_microbatches(config: RunConfig, world_size: int) -> str | None:
    """The interleaved schedule works on groups of microbatches, one per stage."""
    model = config.model
    count = microbatches(config, world_size)
    stages = model.pipeline_model_parallel_size
    group = model.microbatch_group_size_per_vp_stage or stages
    if model.virtual_pipeline_model_parallel_size is None or count is None:
        return None
    if stages <= group <= count and not 0 < count % group < stages:
        return None
    return (
        f"train.global_batch_size={config.train.global_batch_size} gives {count} microbatches per rank, which "
        f"virtual pipelining over {stages} stages cannot interleave in groups of {group}: use "
        f"{multiple_near(count, stages)} microbatches"
    )


def p2p_is_batched_or_overlapped(config: RunConfig, world_size: int) -> str | None:
    """Megatron-Core's schedule supports only one of the two."""
    model = config.model
    if not (model.overlap_p2p_comm and model.batch_p2p_comm):
        return None
    return "model.overlap_p2p_comm=True excludes model.batch_p2p_comm=True: set model.batch_p2p_comm=false"


def cp_divides_sequence(config: RunConfig, world_size: int) -> str | None:
    """Each context-parallel rank holds one early and one late chunk, so that causal work is balanced."""
    size, length = config.model.context_parallel_size, config.dataset.seq_length
    if size == 1 or length % (2 * size) == 0:
        return None
    return (
        f"dataset.seq_length={length} is not a multiple of 2 x model.context_parallel_size = {2 * size}: use "
        f"{multiple_near(length, 2 * size)}"
    )


def cp_a2a_divides_heads(config: RunConfig, world_size: int) -> str | None:
    """All-to-all context parallelism exchanges sequence for heads."""
    model = config.model
    if model.context_parallel_size == 1 or "a2a" not in _cp_kinds(config):
        return None
    tp, cp = model.tensor_model_parallel_size, model.context_parallel_size
    heads, groups = (max(count // tp, 1) for count in model.padded_heads)
    shared = repeats_for_heads(groups, heads, cp) is not None if _on_torch(config) else groups % cp == 0
    if shared:
        return None
    return (
        f"model.cp_comm_type=a2a with model.context_parallel_size={cp} cannot share the {heads} query and "
        f"{groups} key heads of a tensor-parallel rank: use all_gather or a smaller size"
    )


def cp_comm_type_is_available(config: RunConfig, world_size: int) -> str | None:
    """The attention backend supports only some communication types."""
    if config.model.context_parallel_size == 1 or not _on_torch(config):
        return None
    unknown = sorted(_cp_kinds(config) - {"all_gather", "a2a"})
    if not unknown:
        return None
    return f"model.cp_comm_type={', '.join(unknown)} needs Transformer Engine: use all_gather or a2a"


def cp_with_masks_needs_per_token_loss(config: RunConfig, world_size: int) -> str | None:
    """With masked tokens, a mean over ranks of means over tokens is not the mean over tokens."""
    model = config.model
    if model.context_parallel_size == 1 or model.calculate_per_token_loss or not config.dataset.masks_tokens:
        return None
    return (
        f"model.context_parallel_size={model.context_parallel_size} with masked losses needs "
        "model.calculate_per_token_loss=True: set it"
    )


def ep_divides_experts(config: RunConfig, world_size: int) -> str | None:
    """Each expert-parallel rank gets whole experts."""
    model = config.model
    size, experts = model.expert_model_parallel_size, model.num_moe_experts
    if size == 1 or (experts and experts % size == 0):
        return None
    if not experts:
        return f"model.expert_model_parallel_size={size} needs experts, but model.num_moe_experts is not set"
    return (
        f"model.expert_model_parallel_size={size} does not divide model.num_moe_experts={experts}: use "
        f"{near(size, divisors(experts))}"
    )


def tp_with_experts_needs_sp(config: RunConfig, world_size: int) -> str | None:
    """Without sequence parallelism, every tensor-parallel rank would dispatch the same tokens."""
    model = config.model
    if not model.num_moe_experts or model.tensor_model_parallel_size == 1 or model.sequence_parallel:
        return None
    return "model.sequence_parallel=False with experts and tensor parallelism: set model.sequence_parallel=true"


def replicas_divide_batch(config: RunConfig, world_size: int) -> str | None:
    """A global batch is a whole number of microbatches on every replica."""
    train = config.train
    replicas = config.data_parallel_size(world_size)
    unit = train.micro_batch_size * replicas
    if train.global_batch_size % unit == 0:
        return None
    return (
        f"train.global_batch_size={train.global_batch_size} is not a multiple of train.micro_batch_size="
        f"{train.micro_batch_size} x data parallel size {replicas}: use "
        f"{multiple_near(train.global_batch_size, unit)}"
    )


def microbatches(config: RunConfig, world_size: int) -> int | None:
    """Microbatches per rank and step, or None if the batch does not divide."""
    unit = config.train.micro_batch_size * config.data_parallel_size(world_size)
    return None if config.train.global_batch_size % unit else config.train.global_batch_size // unit


def _has_own_split(config: RunConfig) -> bool:
    model = config.model
    return any(
        (
            model.num_layers_in_first_pipeline_stage is not None,
            model.num_layers_in_last_pipeline_stage is not None,
            model.pipeline_model_parallel_layout is not None,
            model.account_for_embedding_in_pipeline_split,
            model.account_for_loss_in_pipeline_split,
            getattr(model, "has_own_stages", False),
        )
    )


def _on_torch(config: RunConfig) -> bool:
    return resolve_backend(config.model.backend) == "torch"


def _cp_kinds(config: RunConfig) -> set[str]:
    kind = config.model.cp_comm_type
    return set(kind) if isinstance(kind, list) else {kind} if kind else set()


def _divides_tp(config: RunConfig, key: str, value: int) -> str | None:
    size = config.model.tensor_model_parallel_size
    if value % size == 0:
        return None
    return (
        f"model.tensor_model_parallel_size={size} does not divide model.{key}={value}: use "
        f"{near(size, divisors(value))}"
    )
