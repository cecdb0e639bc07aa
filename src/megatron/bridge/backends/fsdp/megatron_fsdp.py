# SPDX-License-Identifier: Apache-2.0
"""Megatron-FSDP for Megatron-Core's models: flat buffers of several parameters, split into equal parts.

Parts begin and end between rows of a parameter, so each rank keeps complete rows, as with PyTorch's FSDP2
(`torch_fsdp2`). The numbers of rows differ: a rank often keeps all of a small parameter and none of another.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any, cast

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.fsdp import mcore_fsdp_adapter as core
from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer as core_buffers
from megatron.core.distributed.fsdp.src.megatron_fsdp.utils import FSDPDistributedIndex
from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn
from torch.distributed import DeviceMesh, ProcessGroup

from megatron.bridge.backends.cpu.device import has_cuda
from megatron.bridge.backends.fsdp.sharded_rows import (
    ParameterAttributes,
    RowRanges,
    copies,
    dense_shards,
    expert_shards,
    install_norms,
    mesh_dim_names,
    ranks_by_copy,
)
from megatron.bridge.utils.errors import UserError

NO_SHARD = "no_shard"
SHARD_GRADIENTS = "optim_grads"
SHARD_WEIGHTS = "optim_grads_params"
_LEAST_UNIT = (
    1_000_000_000  # elements that are gathered or reduced ahead unless a config says otherwise
)
STRATEGIES = ("optim", SHARD_GRADIENTS, SHARD_WEIGHTS)


class MegatronFSDPWrapper(core.FullyShardedDataParallel):
    """A model chunk whose optimizer state, gradients and weights are sharded over its replicas.

    Outside of forward and backward passes, its parameters are this rank's rows of the fp32 master weights. The
    compute weights are a separate copy, sharded or whole. Gradients are reduced and summed in fp32.

    ``data_parallel_sharding_strategy`` of ``ddp_config`` selects what is sharded. The chunk is in the precision of
    the config, with equal weights on all ranks.
    """

    def __init__(
        self,
        config: TransformerConfig,
        ddp_config: DistributedDataParallelConfig,
        module: nn.Module,
    ) -> None:
        ranks = dense_shards().size()
        ddp_config = resolve_ddp_config(ddp_config, ranks)
        ranges = row_ranges(module, ddp_config, ranks, expert_shards().size())
        attributes = {
            name: ParameterAttributes.of(parameter) for name, parameter in module.named_parameters()
        }
        units = tuple(cast(list[type[nn.Module]], fsdp_units(ddp_config)))
        chunk_config = ddp_config
        if units and not any(isinstance(part, units) for part in module.modules()):
            # Megatron-Core divides by the number of layers of a chunk, which may be 0
            chunk_config = replace(ddp_config, suggested_communication_unit_size=_LEAST_UNIT)
        super().__init__(
            config,
            chunk_config,
            module,
            fsdp_unit_modules=fsdp_units(ddp_config),
            device=next(module.parameters()).device,
        )
        self.ddp_config = ddp_config  # equal for all chunks, which the optimizer checks
        del self.start_param_sync  # an attribute of Megatron-Core that hides the method below
        computed = dict(self._compute_rows())
        for name, parameter in module.named_parameters():
            attributes[name].attach(parameter, ranges[name], computed[name])

    def _init_dist_index(self, pg_collection: object) -> FSDPDistributedIndex:
        """Return an index of the replicas only, on the available device.

        With the tensor-parallel group, Megatron-FSDP would describe parameters by their full shape over
        tensor-parallel ranks, but it should shard the part of one rank. It requires a tensor-parallel dimension,
        so it gets a group that holds this rank alone. Experts are sharded over the ranks that have the same experts.
        """
        group = dense_shards()
        expert_group = expert_shards()
        alone = _group_of_one()
        self.tp_group = alone
        same_ranks = _ranks(group) == _ranks(expert_group)
        if self.ddp_config.num_distributed_optimizer_instances > 1:
            install_norms()
            names = mesh_dim_names("copies", "replicas", "alone")
            replicas = _replica_group()
            expert_replicas = _expert_group()
            mesh = _mesh_with_copies(replicas, group, alone, names)
            expert_mesh = mesh
            if not same_ranks:
                expert_mesh = _mesh_with_copies(expert_replicas, expert_group, alone, names)
            return FSDPDistributedIndex(
                device_mesh=mesh,
                dp_outer_dim=names[0],
                dp_shard_dim=names[1],
                tp_dim=names[2],
                expt_device_mesh=expert_mesh,
                hybrid_fsdp_group=replicas,
                hybrid_fsdp_expt_group=expert_replicas,
            )
        names = mesh_dim_names("replicas", "alone")
        mesh = _mesh(group, alone, names)
        expert_mesh = mesh if same_ranks else _mesh(expert_group, alone, names)
        return FSDPDistributedIndex(
            device_mesh=mesh, dp_shard_dim=names[0], tp_dim=names[1], expt_device_mesh=expert_mesh
        )

    def _compute_rows(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Return this rank's rows of the compute weights, by parameter name."""
        buffer = cast(core_buffers.ParamAndGradBuffer, self.param_and_grad_buffer)
        for group in buffer.parameter_groups:
            weights = cast(core_buffers.DataParallelBuffer, group.model_weight_buffer)
            for index, parameter in enumerate(group.params):
                rows = weights.get_item(index, only_shard=True)
                yield buffer.param_to_name[parameter], rows.view(-1, *parameter.shape[1:])

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Run the chunk. Whole weights are freed after the backward pass; without gradients, immediately."""
        output = super().forward(*inputs, **named)
        if not torch.is_grad_enabled():
            cast(Any, self).synchronize_param_gather()
        sends = self.config.pipeline_model_parallel_size > 1
        if sends and isinstance(output, torch.Tensor) and output._base is not None:
            # Megatron-Core frees what a stage has sent, which it refuses for a view
            return output.clone()
        return output

    def start_param_sync(self, *unused: Any, **options: Any) -> None:
        """Do nothing: the next forward pass gathers the weights that it needs."""

    def sync_rng_states_across_tp_group(self) -> None:
        """Do nothing: tensor-parallel ranks need different random states."""


def _replica_group() -> ProcessGroup:
    return cast(ProcessGroup, parallel_state.get_data_parallel_group(with_context_parallel=True))


def _expert_group() -> ProcessGroup:
    return cast(ProcessGroup, parallel_state.get_expert_data_parallel_group())


def _group_of_one() -> ProcessGroup:
    """Return a group that holds this rank alone."""
    for existing in (
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_pipeline_model_parallel_group(),
    ):
        group = cast(ProcessGroup, existing)
        if group.size() == 1:
            return group
    rank = torch.distributed.get_rank()
    new_group = torch.distributed.new_group([rank], use_local_synchronization=True)
    return cast(ProcessGroup, new_group)


def _ranks(group: ProcessGroup) -> list[int]:
    return torch.distributed.get_process_group_ranks(group)


def _mesh(group: ProcessGroup, alone: ProcessGroup, names: tuple[str, ...]) -> DeviceMesh:
    device = "cuda" if has_cuda() else "cpu"
    ranks = [[rank] for rank in _ranks(group)]
    return DeviceMesh.from_group([group, alone], device, mesh=ranks, mesh_dim_names=names)


def _mesh_with_copies(
    replicas: ProcessGroup, shards: ProcessGroup, alone: ProcessGroup, names: tuple[str, ...]
) -> DeviceMesh:
    device = "cuda" if has_cuda() else "cpu"
    ranks = [[[rank] for rank in copy] for copy in ranks_by_copy(replicas, shards)]
    groups = [copies(), shards, alone]
    return DeviceMesh.from_group(groups, device, mesh=ranks, mesh_dim_names=names)


def resolve_ddp_config(
    ddp_config: DistributedDataParallelConfig, replicas: int
) -> DistributedDataParallelConfig:
    """Return ``ddp_config`` with the reduction, overlap and precision settings that Megatron-FSDP needs here.

    Gradients must have the dtype of the master weights: otherwise they are copies, and changes before they are
    scaled (the sum over tensor-parallel ranks under sequence parallelism) would be lost. With overlap, weights are
    gathered at their first use, so they are never from an earlier step; without overlap, only ``start_param_sync``
    would gather them.
    """
    strategy = ddp_config.data_parallel_sharding_strategy or SHARD_WEIGHTS
    if strategy not in STRATEGIES:
        raise UserError(
            f"ddp.data_parallel_sharding_strategy={strategy} with ddp.use_megatron_fsdp=True shards nothing: "
            f"use one of {', '.join(STRATEGIES)}"
        )
    return replace(
        ddp_config,
        use_megatron_fsdp=True,
        data_parallel_sharding_strategy=strategy,
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        bucket_size=ddp_config.bucket_size
        or max(40_000_000, 1_000_000 * replicas),  # as in Megatron-Core
        gradient_reduce_div_fusion=False,  # only for NCCL
        fsdp_all_gather_in_start_param_sync=False,
        megatron_fsdp_main_params_dtype=torch.float32,
        megatron_fsdp_main_grads_dtype=torch.float32,
    )


def fsdp_units(ddp_config: DistributedDataParallelConfig) -> list[nn.Module]:
    """Return the classes of modules that are gathered separately; other weights stay gathered after their first use.

    Megatron-Core's annotation says modules, but it expects classes.
    """
    kinds = (
        [TransformerLayer, MambaLayer]
        if ddp_config.data_parallel_sharding_strategy == SHARD_WEIGHTS
        else []
    )
    return cast(list[nn.Module], kinds)


@dataclass(frozen=True)
class FlatBuffer:
    """Adjacent parameters that are sharded, gathered and reduced together."""

    parameters: list[nn.Parameter]  # in the order of their offsets
    starts: list[int]  # the offset of each parameter
    size: int  # number of elements, padded to a multiple of the number of ranks
    unit: int | None  # the index of the layer that the parameters belong to; None outside of layers
    ranks: int = 1  # that share it


def flat_buffers(
    module: nn.Module,
    ddp_config: DistributedDataParallelConfig,
    replicas: int,
    expert_replicas: int | None = None,
) -> Iterator[FlatBuffer]:
    """Return the buffers of Megatron-FSDP for the parameters of a chunk.

    Args:
        module: The chunk, which may be on the meta device.
        ddp_config: What is sharded, and the sizes of buffers.
        replicas: The number of ranks with the same dense weights.
        expert_replicas: The number of ranks with the same experts; None if it is the same.
    """
    strategy = ddp_config.data_parallel_sharding_strategy
    policy = core_buffers.BucketingPolicy(ddp_config.bucket_size, fsdp_units(ddp_config), strategy)
    for group in core_buffers._get_parameter_groups(module, policy, {})[0]:
        shapes = [parameter.shape for parameter in group.params]
        ranks = (expert_replicas or replicas) if group.is_expert_param else replicas
        buffer_index = core_buffers.build_data_parallel_buffer_index(
            shapes, 0, ranks, True, ddp_config, chunk_size_factor=group.chunk_size_factor
        )
        places = cast(Any, buffer_index[0])
        full_buffer = buffer_index[1]
        starts = [places[index].global_data_index for index in range(len(shapes))]
        yield FlatBuffer(group.params, starts, full_buffer.size, group.fsdp_unit_id, ranks)


@dataclass(frozen=True)
class TemporaryElements:
    """Elements of a rank in addition to its own shard, at the peak of a step."""

    gathered: int  # full weights: outside of layers, of one layer, and of prefetched layers
    reduced: int  # full gradients that wait for their reduction, and the gradients of one more layer or buffer


def temporary_elements(
    ddp_config: DistributedDataParallelConfig, buffers: Sequence[FlatBuffer]
) -> TemporaryElements:
    """Return the peak of gathered and unreduced elements: usually all of a model with less than 500M parameters."""
    layers: dict[int, int] = {}
    for buffer in buffers:
        if buffer.unit is not None:
            layers[buffer.unit] = layers.get(buffer.unit, 0) + buffer.size
    outside = [buffer.size for buffer in buffers if buffer.unit is None]
    inside = sum(layers.values())
    layer = max(layers.values(), default=0)
    in_flight = ddp_config.suggested_communication_unit_size
    if in_flight is None:
        in_flight = max(
            _LEAST_UNIT, 2 * inside // max(len(layers), 1)
        )  # a minimum; its comment says maximum
    gathered = sum(outside) + min(inside, layer + in_flight // 2)
    return TemporaryElements(
        gathered, min(sum(outside) + inside, max(layer, *outside, 0) + in_flight)
    )


def row_ranges(
    module: nn.Module,
    ddp_config: DistributedDataParallelConfig,
    replicas: int,
    expert_replicas: int | None = None,
) -> dict[str, RowRanges]:
    """Return the rows of each parameter that each rank will keep; the arguments are those of `flat_buffers`."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    return {
        names[parameter]: _row_ranges(
            names[parameter],
            tuple(parameter.shape),
            start,
            buffer.size // buffer.ranks,
            buffer.ranks,
        )
        for buffer in flat_buffers(module, ddp_config, replicas, expert_replicas)
        for parameter, start in zip(buffer.parameters, buffer.starts, strict=True)
    }


def _row_ranges(
    name: str, shape: tuple[int, ...], start: int, part: int, replicas: int
) -> RowRanges:
    size = prod(shape)
    row = max(1, prod(shape[1:]))
    bounds = [min(max(rank * part - start, 0), size) for rank in range(replicas + 1)]
    if any(bound % row for bound in bounds):
        raise UserError(
            f"ddp.use_megatron_fsdp=True would split {name} of shape {shape} inside a row, which cannot be saved: "
            "use dist.use_torch_fsdp2=true or ddp.use_distributed_optimizer=true instead"
        )
    rows = [bound // row for bound in bounds]
    return tuple(range(first, end) for first, end in pairwise(rows))
