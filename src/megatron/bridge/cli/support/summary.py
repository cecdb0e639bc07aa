# SPDX-License-Identifier: Apache-2.0
"""Summarize a config as text: its sizes, computed from shapes, and the ranks of each part of the model."""

from collections.abc import Iterator

from megatron.bridge.autotune.memory import RankMemory
from megatron.bridge.autotune.meta_model import parameter_count
from megatron.bridge.cli.support import text_format
from megatron.bridge.data.config import MockGPTDatasetConfig
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.config.batch_size import BatchSize

NODE = 8  # GPUs per node

_COLUMNS = 4  # data-parallel replicas to show
_ROWS = 8  # pipeline stages to show; the others are left out before the last one


def _layout(config: "ConfigContainer", world_size: int) -> str:
    """The layout in one line: ``8 processes = tensor 2 with sequence parallelism x pipeline 1 x ...``."""
    model = config.model
    virtual = model.virtual_pipeline_model_parallel_size
    sequence = " with sequence parallelism" if model.sequence_parallel else ""
    interleaved = f" of {virtual} interleaved stages" if virtual else ""
    parts = [
        f"tensor {model.tensor_model_parallel_size}{sequence}",
        f"pipeline {model.pipeline_model_parallel_size}{interleaved}",
        f"context {_context_sizes(config, world_size)}",
        f"data {config.data_parallel_size(world_size)}",
    ]
    return f"{world_size} process{'es' if world_size > 1 else ''} = {' x '.join(parts)}"


def _context_sizes(config: "ConfigContainer", world_size: int) -> str:
    if config.model.hybrid_context_parallel:
        return f"1 to {config.data_parallel_size(world_size)} for each sample"
    return str(config.model.context_parallel_size)


def rank_table(config: "ConfigContainer", world_size: int) -> Iterator[str]:
    """One row per pipeline stage and one column per replica; a cell has the ranks that share the same weights.

    Megatron-Core numbers ranks in the order tensor, context, data, pipeline.
    """
    model = config.model
    stages = model.pipeline_model_parallel_size
    replicas = config.data_parallel_size(world_size)
    cell = model.tensor_model_parallel_size * model.context_parallel_size
    columns = _shortened(replicas, _COLUMNS)
    texts = {
        (stage, replica): span((stage * replicas + replica) * cell, cell)
        for stage in range(stages)
        for replica in range(replicas)
    }
    width = max(map(len, [*texts.values(), f"data {replicas - 1}"]))
    yield "ranks".ljust(10) + "  ".join(
        "..." if at is None else f"data {at}".ljust(width) for at in columns
    )
    for stage in _shortened(stages, _ROWS):
        if stage is None:
            yield "..."
            continue
        cells = ["..." if at is None else texts[stage, at].ljust(width) for at in columns]
        yield (f"stage {stage}".ljust(10) + "  ".join(cells)).rstrip()
    yield from _groups(config, world_size)


def _groups(config: "ConfigContainer", world_size: int) -> Iterator[str]:
    """The groups within a cell, the expert groups, and the groups that cross nodes."""
    model = config.model
    tensor = model.tensor_model_parallel_size
    context = model.context_parallel_size
    if tensor * context > 1:
        shares = [f"tensor groups of {tensor}: {span(0, tensor)}"] if tensor > 1 else []
        shares += [f"context groups of {context}: {_list(context, tensor)}"] if context > 1 else []
        yield f"in a cell: {'; '.join(shares)}"
    if model.num_moe_experts:
        yield _experts(config)
    if world_size > NODE:
        yield f"nodes of {NODE} GPUs: {_across_nodes(config, world_size)}"


def _experts(config: "ConfigContainer") -> str:
    model = config.model
    size = model.expert_model_parallel_size
    experts = model.num_moe_experts or 0
    cut = model.expert_tensor_ranks
    each = f"{experts // size} of {experts} experts on each rank"
    # Megatron-Core orders the ranks of experts by expert tensor, expert, then the rest
    groups = f"expert groups of {size}: {_list(size, cut)}" if size > 1 else "no expert groups"
    return f"experts: {groups}; {each}" + (f", each split over {cut} ranks" if cut > 1 else "")


def _across_nodes(config: "ConfigContainer", world_size: int) -> str:
    """The groups that stay within a node, where links are fast, and the groups that do not."""
    model = config.model
    expert = model.expert_tensor_ranks * model.expert_model_parallel_size
    reach = {
        "tensor": (model.tensor_model_parallel_size, model.tensor_model_parallel_size),
        "context": (
            model.context_parallel_size,
            model.tensor_model_parallel_size * model.context_parallel_size,
        ),
        "expert": (model.expert_model_parallel_size, expert),
        "data": (
            config.data_parallel_size(world_size),
            world_size // model.pipeline_model_parallel_size,
        ),
        "pipeline": (model.pipeline_model_parallel_size, world_size),
    }
    inside = [
        name
        for name, (size, ranks) in reach.items()
        if size > 1 and ranks <= NODE and NODE % ranks == 0
    ]
    across = [name for name, (size, _) in reach.items() if size > 1 and name not in inside]
    sentences = [f"{_and(inside)} groups stay within one node"] if inside else []
    sentences += [f"{_and(across)} groups span several nodes"] if across else []
    return "; ".join(sentences)


def _and(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def memory_table(memory: list[RankMemory], layers: list[str]) -> Iterator[str]:
    """Memory of one rank of each stage, in GB (10^9 bytes), with the ``layers`` of each stage as text."""
    second_models = [
        name for name in ("teacher", "critic") if any(getattr(rank, name) for rank in memory)
    ]
    head = (
        "",
        "parameters",
        "weights",
        "gradients",
        "optimizer",
        "activations",
        *second_models,
        "total GB",
        "layers",
    )
    rows: list[tuple[str, ...]] = [head]
    for stage in _shortened(len(memory), _ROWS):
        if stage is None:
            rows.append(("...", *[""] * (len(head) - 1)))
            continue
        rank = memory[stage]
        sizes = (
            rank.weights,
            rank.gradients,
            rank.optimizer,
            rank.activations,
            *(getattr(rank, name) for name in second_models),
            rank.total,
        )
        rows.append(
            (f"stage {stage}", f"{rank.parameters:,}", *map(gigabytes, sizes), layers[stage])
        )
    width = max(len(row[0]) for row in rows)
    yield from text_format.columns([(row[0].ljust(width), *row[1:]) for row in rows])


def gigabytes(count: int) -> str:
    return f"{count / 1e9:.1f}"


def _shortened(count: int, limit: int) -> list[int | None]:
    """Return the numbers below ``count``; None replaces those before the last one if there are more than ``limit``."""
    return [*range(count)] if count <= limit else [*range(limit - 1), None, count - 1]


def span(start: int, count: int) -> str:
    """Write ``count`` consecutive numbers as text."""
    return str(start) if count == 1 else f"{start}-{start + count - 1}"


def _list(count: int, step: int) -> str:
    numbers = [str(step * index) for index in range(min(count, 4))]
    return ", ".join(numbers) + (", ..." if count > 4 else "")


def describe(config: "ConfigContainer", world_size: int) -> list[str]:
    model = config.model
    train = config.train
    replicas = config.data_parallel_size(world_size)
    tokens = train.global_batch_size * config.dataset.seq_length
    total_tokens = BatchSize(train).samples_after(train.train_iters) * config.dataset.seq_length
    first = (
        f", growing from {train.rampup_batch_size[0]} samples" if train.rampup_batch_size else ""
    )
    return [
        f"model: {parameter_count(model):,} parameters, {model.num_layers} layers, hidden size {model.hidden_size}",
        f"layout: {_layout(config, world_size)}",
        f"run: {train.train_iters:,} steps, {total_tokens:,} tokens; each step {train.global_batch_size} samples x "
        f"{config.dataset.seq_length} tokens = {tokens:,} tokens, in {_microbatches(config, replicas)}"
        f"{f' on each of {replicas} replicas' if replicas > 1 else ''}{first}",
    ]


def _microbatches(config: "ConfigContainer", replicas: int) -> str:
    if config.model.hybrid_context_parallel:
        return f"planned microbatches of up to {config.model.max_seqlen_per_dp_cp_rank} tokens"
    train = config.train
    count = train.global_batch_size // (train.micro_batch_size * replicas)
    return f"{text_format.many(count, 'microbatch', 'es')} of {train.micro_batch_size}"


def warnings(config: "ConfigContainer") -> Iterator[str]:
    if isinstance(config.dataset, MockGPTDatasetConfig):
        yield "no data was given: this run trains on mock data (use --data PATH for real data)"
    if config.checkpoint.save is None:
        yield "checkpoint.save is not set: this run saves no checkpoint (set checkpoint.save=DIR)"
