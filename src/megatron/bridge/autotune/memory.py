# SPDX-License-Identifier: Apache-2.0
"""Compute the memory of a GPU for a config: counted on the sharded model, except activations, which are estimated.

Weights, gradients and optimizer state come from the chunks that a rank would build (``ranks``), in the buffers of
Megatron-Core's data parallelism, including padding. See ``activations`` for the activations and ``reserve`` for
the memory that is not in tensors.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from megatron.core.distributed.param_and_grad_buffer import group_params_for_buffers
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer.module import MegatronModule
from torch import nn

from megatron.bridge.autotune import activations, meta_model
from megatron.bridge.backends.fsdp import megatron_fsdp
from megatron.bridge.backends.fsdp.torch_fsdp2 import expert_parameters
from megatron.bridge.backends.low_bit.weight import LowBitWeight, stored_bytes
from megatron.bridge.models.model_provider import ModelProvider
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.config.resolve.precision import without_quantization
from megatron.bridge.training.optim.optimizer import STATE_NAMES

_FP32 = 4  # bytes


@dataclass(frozen=True)
class RankMemory:
    """Bytes of each rank of one pipeline stage."""

    stage: int  # pipeline rank
    parameters: int  # parameters on a rank, including frozen ones
    weights: int  # of the model in the compute precision
    gradients: int  # gradient buffers
    optimizer: int  # fp32 copies of the weights and the moments of the optimizer: this rank's share
    activations: (
        int  # peak of a step: saved for the backward pass, and its temporary tensors (an estimate)
    )
    teacher: int = (
        0  # weights of a teacher, and what the teacher adds to the activations (an estimate)
    )
    # weights, gradients and optimizer of a critic, and by how much its activations exceed those of the policy
    critic: int = 0
    # weights of the full model, which a GPU holds before fully sharded data parallelism shards them
    unsharded: int = 0

    @property
    def states(self) -> int:
        """Bytes that the trained model needs between two steps."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """Bytes at the peak of a step, or of the setup if that needs more."""
        return max(self.states + self.activations + self.teacher + self.critic, self.unsharded)


def memory_per_rank(
    config: ConfigContainer,
    world_size: int,
    teacher: ModelProvider | None = None,
    critic: ConfigContainer | None = None,
) -> list[RankMemory]:
    """Return the memory of a rank of each pipeline stage.

    Args:
        config: The config, validated for ``world_size``.
        world_size: Processes of the run.
        teacher: A second model in the layout of the model, which is not trained.
        critic: The config of a second model in the same layout that is trained in turn.
    """
    # quantization keeps the weights in bf16, and Megatron-Core can build such layers only with Transformer Engine
    stages = meta_model.stage_chunks(without_quantization(config.model), config.peft)
    ranks = [
        _stage_memory(config, chunks, stage, world_size) for stage, chunks in enumerate(stages)
    ]
    if critic is not None:
        of_critic = memory_per_rank(critic, world_size)
        ranks = [
            replace(
                rank,
                critic=other.states + max(0, other.activations - rank.activations),
            )
            for rank, other in zip(ranks, of_critic, strict=True)
        ]
    if teacher is None:
        return ranks
    teacher_stages = enumerate(meta_model.stage_chunks(teacher))
    taught = [
        _of_teacher(config, teacher, chunks, stage, world_size) for stage, chunks in teacher_stages
    ]
    return [replace(rank, teacher=more) for rank, more in zip(ranks, taught, strict=True)]


def fullest_stage(memory: Sequence[RankMemory]) -> RankMemory:
    """Return the rank with the highest total, which decides whether a layout fits."""
    return max(memory, key=lambda rank: rank.total)


@dataclass(frozen=True)
class _Replicas:
    """Numbers of ranks with the same weights, which share the optimizer state."""

    dense: int
    expert: int

    @classmethod
    def of(cls, config: ConfigContainer, world_size: int) -> "_Replicas":
        model = config.model
        instances = config.ddp.num_distributed_optimizer_instances
        expert_tensor = model.expert_tensor_ranks
        dense = world_size // (
            model.tensor_model_parallel_size * model.pipeline_model_parallel_size
        )
        expert = world_size // (
            expert_tensor * model.expert_model_parallel_size * model.pipeline_model_parallel_size
        )
        return cls(max(dense // instances, 1), max(expert // instances, 1))


def _stage_memory(
    config: ConfigContainer, chunks: list[MegatronModule], stage: int, world_size: int
) -> RankMemory:
    model = without_quantization(config.model).resolved()
    replicas = _Replicas.of(config, world_size)
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    if model.bf16 or model.fp16:
        for parameter in parameters:
            if not isinstance(parameter, LowBitWeight):
                parameter.data = parameter.data.to(model.params_dtype)
    buffers = [buffer for chunk in chunks for buffer in chunk.buffers()]
    weights = sum(stored_bytes(tensor) for tensor in (*parameters, *buffers))
    weights += quantized_bytes(config.model) * sum(map(_quantized_numbers, chunks))
    gradients = optimizer = unsharded = 0
    stepped = np.zeros(world_size // model.pipeline_model_parallel_size, dtype=np.int64)
    if config.ddp.use_megatron_fsdp or (
        config.dist.use_torch_fsdp2 and not config.model.use_cpu_initialization
    ):
        unsharded = weights
    if config.dist.use_torch_fsdp2:
        weights, gradients, optimizer = _fully_sharded(config, chunks, replicas)
    elif config.ddp.use_megatron_fsdp:
        weights, gradients, optimizer = _megatron_fsdp(config, chunks, replicas)
    else:
        for index, chunk in enumerate(chunks):
            padding, reduced = _distributed_bytes(
                config, chunk, stage == index == 0, replicas, stepped
            )
            weights += padding
            gradients += reduced
        optimizer = int(stepped.max())
    return RankMemory(
        stage=stage,
        parameters=sum(parameter.numel() for parameter in parameters),
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations.activation_bytes(config, chunks, stage, world_size)
        + _dequantized_bytes(chunks, model.params_dtype),
        unsharded=unsharded,
    )


def _fully_sharded(
    config: ConfigContainer, chunks: list[MegatronModule], replicas: _Replicas
) -> tuple[int, int, int]:
    """Return the bytes of fp32 weights (with gathered layers and gradients), gradients and optimizer state (FSDP2)."""
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    experts = {id(parameter) for chunk in chunks for parameter in expert_parameters(chunk)}
    trained = frozen = 0
    for parameter in parameters:
        ranks = replicas.expert if id(parameter) in experts else replicas.dense
        share = -(-parameter.shape[0] // ranks) * parameter[:1].numel()
        trained += share if parameter.requires_grad else 0
        frozen += 0 if parameter.requires_grad else share * parameter.element_size()
    decoders = [cast(Any, chunk).decoder for chunk in chunks]
    layers = [
        sum(weight.nbytes for weight in layer.parameters())
        for decoder in decoders
        for layer in decoder.layers
    ]
    outside = sum(parameter.nbytes for parameter in parameters) - sum(layers)
    return (
        _FP32 * trained + frozen + outside + 2 * max(layers, default=0),
        _FP32 * trained,
        trained * optimizer_bytes(config, torch.float32),
    )


def _megatron_fsdp(
    config: ConfigContainer, chunks: list[MegatronModule], replicas: _Replicas
) -> tuple[int, int, int]:
    """Return the bytes of weights, gradients and optimizer state in equal parts of padded buffers, some gathered."""
    ddp = megatron_fsdp.resolve_ddp_config(config.ddp, replicas.dense)
    by_chunk = [
        list(megatron_fsdp.flat_buffers(chunk, ddp, replicas.dense, replicas.expert))
        for chunk in chunks
    ]
    buffers = [buffer for chunk_buffers in by_chunk for buffer in chunk_buffers]
    full_size = sum(buffer.size for buffer in buffers)
    share = sum(buffer.size // buffer.ranks for buffer in buffers)
    peaks = [megatron_fsdp.temporary_elements(ddp, chunk_buffers) for chunk_buffers in by_chunk]
    gathered = sum(peak.gathered for peak in peaks)
    reduced = sum(peak.reduced for peak in peaks)
    cuts_weights = ddp.data_parallel_sharding_strategy == megatron_fsdp.SHARD_WEIGHTS
    cuts_gradients = (
        cuts_weights or ddp.data_parallel_sharding_strategy == megatron_fsdp.SHARD_GRADIENTS
    )
    element_size = next(chunks[0].parameters()).element_size()
    return (
        (share + gathered if cuts_weights else full_size) * element_size,
        _FP32 * (share + reduced if cuts_gradients else full_size),
        share * (_FP32 + optimizer_bytes(config, torch.float32)),
    )


def _of_teacher(
    config: ConfigContainer,
    teacher: ModelProvider,
    chunks: list[MegatronModule],
    stage: int,
    world_size: int,
) -> int:
    for chunk in chunks:
        chunk.to(teacher.resolved().params_dtype)
    tensors = [tensor for chunk in chunks for tensor in (*chunk.parameters(), *chunk.buffers())]
    activation_bytes = activations.teacher_bytes(
        replace(config, model=teacher), chunks, stage, world_size
    )
    return sum(tensor.nbytes for tensor in tensors) + activation_bytes


def _dequantized_bytes(chunks: list[MegatronModule], dtype: torch.dtype) -> int:
    """Return the bytes of the largest layer whose weights are dequantized while it computes.

    The kernel for grouped experts gets the weights of all local experts at once.
    """
    sizes = [
        sum(
            parameter.numel()
            for parameter in module.parameters(recurse=False)
            if isinstance(parameter, LowBitWeight)
        )
        for chunk in chunks
        for module in chunk.modules()
    ]
    return max(sizes) * dtype.itemsize


def quantized_bytes(model: Any) -> int:
    """Return the bytes per matrix element in addition to two for bf16, or instead of them with ``fp8_param``.

    Transformer Engine stores each matrix as is and transposed: one byte each in FP8, half a byte in FP4.
    """
    replaced = 2 if model.fp8_param or model.fp4_param else 0
    return (2 if model.fp8 else 1 if model.fp4 else replaced) - replaced


def _quantized_numbers(chunk: nn.Module) -> int:
    """Return the number of matrix elements in the layers."""
    return sum(
        weight.numel()
        for name, weight in chunk.named_parameters()
        if ".layers." in name and weight.dim() > 1
    )


def _distributed_bytes(
    config: ConfigContainer,
    chunk: nn.Module,
    bucketed: bool,
    replicas: _Replicas,
    stepped: np.ndarray,
) -> tuple[int, int]:
    """Return the bytes of a chunk's buffer padding and gradients; add its optimizer state to ``stepped``, by rank."""
    if config.train.skip_train:
        return 0, 0
    parameters = [parameter for parameter in chunk.parameters() if parameter.requires_grad]
    groups = group_params_for_buffers(parameters, bool(config.ddp.grad_reduce_in_fp32))
    lengths = {
        key: sum(parameter.numel() for parameter in members) for key, (members, _) in groups.items()
    }
    padded = lengths
    owned = {key: np.full(len(stepped), length) for key, length in lengths.items()}
    if config.ddp.use_distributed_optimizer:
        bucket = (
            bucket_size(config, replicas.dense)
            if bucketed and config.ddp.overlap_grad_reduce
            else None
        )
        layout = DistributedOptimizer.compute_full_param_layout(
            parameters, bucket, replicas.dense, config.ddp, replicas.expert
        )
        padded = {key: part.bucket_indices[-1][1] for key, part in layout.layouts.items()}
        owned = {
            key: _owned_parameters(
                part, replicas.expert if key.is_expert_parallel else replicas.dense, len(stepped)
            )
            for key, part in layout.layouts.items()
        }
    by_layer = config.optimizer.use_layer_wise_distributed_optimizer
    if by_layer:
        owned = _owned_parameters_by_layer(groups, replicas, len(stepped), lambda _: True)
    for key in groups:
        stepped += owned[key] * optimizer_bytes(config, key.param_dtype)
    has_adam = config.optimizer.muon_scalar_optimizer == "adam"
    if (
        config.optimizer.optimizer == "muon" and has_adam
    ):  # Adam updates what is no matrix, with one more moment
        ranks = len(stepped)
        if by_layer:
            of_adam = _owned_parameters_by_layer(groups, replicas, ranks, _is_updated_by_adam)
        else:
            of_adam = {
                key: np.full(ranks, sum(p.numel() for p in members if _is_updated_by_adam(p)))
                for key, (members, _) in groups.items()
            }
        stepped += sum(of_adam.values()) * _FP32
    return (
        sum((padded[key] - lengths[key]) * key.param_dtype.itemsize for key in groups),
        sum(padded[key] * key.grad_dtype.itemsize for key in groups),
    )


def _owned_parameters(part: Any, shards: int, ranks: int) -> np.ndarray:
    """Return the parameters that each of ``ranks`` owns: those in its part of the buckets, which end with padding."""
    owned = np.zeros(shards, dtype=np.int64)
    for start, end, bucket in part.param_index_map.values():
        first, last = part.bucket_indices[bucket]
        edges = np.linspace(first, last, shards + 1, dtype=np.int64)
        owned += np.clip(np.minimum(end, edges[1:]) - np.maximum(start, edges[:-1]), 0, None)
    return np.resize(np.repeat(owned, max(ranks // shards, 1)), ranks)


def _is_updated_by_adam(parameter: nn.Parameter) -> bool:
    is_at_an_end = getattr(parameter, "is_embedding_or_output_parameter", False)
    return parameter.dim() != 2 or is_at_an_end


def _owned_parameters_by_layer(
    groups: Any, replicas: _Replicas, ranks: int, is_counted: Callable[[nn.Parameter], bool]
) -> dict[Any, np.ndarray]:
    """Return the numbers of counted parameters that each rank owns, if Megatron-Core distributes whole ones.

    It sorts them by size and goes back and forth over the ranks.

    Args:
        groups: Parameters by buffer, as Megatron-Core groups them.
        replicas: Ranks that share dense parameters, and experts.
        ranks: Ranks of a pipeline stage.
        is_counted: Whether a parameter counts.
    """
    owned = {key: np.zeros(ranks, dtype=np.int64) for key in groups}
    for is_expert, shards in ((False, replicas.dense), (True, replicas.expert)):
        parameters = [
            (parameter, key)
            for key, (members, _) in groups.items()
            for parameter in members
            if key.is_expert_parallel == is_expert
        ]
        parameters.sort(key=lambda pair: pair[0].numel())
        for index, (parameter, key) in enumerate(parameters):
            lap, place = divmod(index, shards)
            share = np.zeros(shards, dtype=np.int64)
            share[place if lap % 2 == 0 else shards - 1 - place] = parameter.numel()
            if is_counted(parameter):
                owned[key] += np.resize(np.repeat(share, max(ranks // shards, 1)), ranks)
    return owned


def bucket_size(config: ConfigContainer, replicas: int) -> int:
    """Return the number of parameters in a gradient bucket, as Megatron-Core chooses it."""
    return config.ddp.bucket_size or max(40_000_000, 1_000_000 * replicas)


def optimizer_bytes(config: ConfigContainer, dtype: torch.dtype) -> int:
    """Return the bytes per trained parameter on its device: an fp32 copy, unless it is fp32, and the moments."""
    optimizer = config.optimizer
    copy = 0 if dtype == torch.float32 else _FP32
    moments = _FP32 * len(STATE_NAMES[optimizer.optimizer])
    if optimizer.optimizer == "sgd" and not optimizer.sgd_momentum:
        moments = 0
    on_device = 1 - optimizer.optimizer_offload_fraction if optimizer.optimizer_cpu_offload else 1
    if not optimizer.use_precision_aware_optimizer:
        return copy + round(on_device * moments)
    if not optimizer.optimizer_cpu_offload:
        moments = optimizer.exp_avg_dtype.itemsize + optimizer.exp_avg_sq_dtype.itemsize
        own_copy = optimizer.fp8_recipe in (
            None,
            "delayed",
        )  # otherwise Megatron-Core keeps the copies
        copy = (
            2
            if optimizer.store_param_remainders and dtype == torch.bfloat16 and own_copy
            else _FP32
        )
    return round(on_device * (copy + moments))
