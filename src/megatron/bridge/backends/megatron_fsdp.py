# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingTypeStubs=false
"""Megatron-FSDP for Megatron-Core's models: flat buffers of several parameters, cut into equal parts.

A part begins and ends between rows of a parameter, so what a rank keeps of one is some whole rows, as with
PyTorch's own (`megatron.bridge.backends.torch_fsdp2`), but unequal ones: often all of a small parameter, and none
of another.
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
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn
from torch.distributed import DeviceMesh, ProcessGroup

from megatron.bridge.backends.device import has_cuda
from megatron.bridge.backends.fully_sharded import Marks
from megatron.bridge.utils.errors import UserError

NOTHING = "no_shard"
GRADIENTS = "optim_grads"
ALL = "optim_grads_params"
STRATEGIES = ("optim", GRADIENTS, ALL)

Cuts = tuple[range, ...]
"""The rows of a parameter that each rank keeps, in the order of ranks."""


class FullyShardedDataParallel(core.FullyShardedDataParallel):
    """A chunk whose optimizer state, gradients and weights are cut over the ranks that would hold the same ones.

    Outside of a forward and a backward pass its parameters are this rank's rows of the fp32 master weights. The
    weights that it computes with are kept beside them, cut or whole. Gradients are reduced and summed in fp32.

    Args:
        config: The model's.
        ddp_config: ``data_parallel_sharding_strategy`` says what is cut.
        module: The chunk, in half precision where the config says so, with equal weights on all ranks.

    Raises:
        UserError: the model is cut into pipeline stages, or a parameter would be cut inside a row.
    """

    def __init__(
        self, config: TransformerConfig, ddp_config: DistributedDataParallelConfig, module: nn.Module
    ) -> None:
        if (stages := config.pipeline_model_parallel_size) > 1:
            raise UserError(f"ddp.use_megatron_fsdp=True: model.pipeline_model_parallel_size={stages} must be 1")
        group = _replicas()
        ddp_config = settings(ddp_config, group.size())
        cuts = cuts_of(module, ddp_config, group.size())
        marks = {name: Marks.of(parameter) for name, parameter in module.named_parameters()}
        super().__init__(
            config,
            ddp_config,
            module,
            fsdp_unit_modules=units(ddp_config),
            device=next(module.parameters()).device,
        )
        del self.start_param_sync  # Megatron-Core's function, in place of the one below
        computed = dict(self._computed_rows())
        for name, parameter in module.named_parameters():
            marks[name].put(parameter, cuts[name], computed[name])

    def _init_dist_index(self, pg_collection: object) -> FSDPDistributedIndex:
        """The replicas, on the device that there is, and no other ranks.

        Told of tensor parallelism, it would describe parameters by their whole shape over tensor-parallel ranks;
        what it shall cut is what one of these has, as everywhere else. Megatron-Core asks for a dimension all the
        same: the group of this rank alone is that of its pipeline stages.
        """
        group = _replicas()
        alone = cast(ProcessGroup, parallel_state.get_pipeline_model_parallel_group())
        self.tp_group = alone
        # torch takes meshes of the same ranks and names for one, also after the groups of the first are gone
        names = (f"replicas_{group.group_name}", f"alone_{group.group_name}")
        mesh = DeviceMesh.from_group(
            [group, alone],
            "cuda" if has_cuda() else "cpu",
            mesh=[[rank] for rank in torch.distributed.get_process_group_ranks(group)],
            mesh_dim_names=names,
        )
        return FSDPDistributedIndex(device_mesh=mesh, dp_shard_dim=names[0], tp_dim=names[1])

    def _computed_rows(self) -> Iterator[tuple[str, torch.Tensor]]:
        """This rank's rows of the weights that the model computes with, by name in the chunk."""
        buffer = cast(core_buffers.ParamAndGradBuffer, self.param_and_grad_buffer)
        for group in buffer.parameter_groups:
            weights = cast(core_buffers.DataParallelBuffer, group.model_weight_buffer)
            for index, parameter in enumerate(group.params):
                rows = weights.get_item(index, only_shard=True)
                yield buffer.param_to_name[parameter], rows.view(-1, *parameter.shape[1:])

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Compute; without gradients whole weights are given back at once, else after the backward pass."""
        output = super().forward(*inputs, **named)
        if not torch.is_grad_enabled():
            cast(Any, self).synchronize_param_gather()
        return output

    def start_param_sync(self, *unused: Any, **options: Any) -> None:
        """Nothing: the next forward pass gathers what it needs, and nothing is under way between two steps."""

    def sync_rng_states_across_tp_group(self) -> None:
        """Nothing: tensor-parallel ranks have random states of their own, from which each draws for its part."""


def _replicas() -> ProcessGroup:
    return cast(ProcessGroup, parallel_state.get_data_parallel_group(with_context_parallel=True))


def settings(ddp_config: DistributedDataParallelConfig, replicas: int) -> DistributedDataParallelConfig:
    """What is reduced when, and in which precision; the rest of ``ddp_config`` stays.

    With another dtype than that of the master weights, gradients would be copies, and what is done to them before
    they are scaled (the sum over tensor-parallel ranks under sequence parallelism) would be lost. Weights that are
    gathered at their first use are never those of an earlier step; without overlap they are gathered by
    ``start_param_sync`` alone.

    Raises:
        UserError: nothing would be cut.
    """
    strategy = ddp_config.data_parallel_sharding_strategy or ALL
    if strategy not in STRATEGIES:
        raise UserError(
            f"ddp.data_parallel_sharding_strategy={strategy} with ddp.use_megatron_fsdp=True cuts nothing: "
            f"use one of {', '.join(STRATEGIES)}"
        )
    return replace(
        ddp_config,
        use_megatron_fsdp=True,
        data_parallel_sharding_strategy=strategy,
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        bucket_size=ddp_config.bucket_size or max(40_000_000, 1_000_000 * replicas),  # as of Megatron-Core's own
        gradient_reduce_div_fusion=False,  # for NCCL alone
        fsdp_all_gather_in_start_param_sync=False,
        megatron_fsdp_main_params_dtype=torch.float32,
        megatron_fsdp_main_grads_dtype=torch.float32,
    )


def units(ddp_config: DistributedDataParallelConfig) -> list[nn.Module]:
    """What is gathered at a time; the rest of the weights stays gathered from its first use on.

    Classes of modules: Megatron-Core means these, and says modules.
    """
    kinds = [TransformerLayer] if ddp_config.data_parallel_sharding_strategy == ALL else []
    return cast(list[nn.Module], kinds)


@dataclass(frozen=True)
class Buffer:
    """Parameters that lie one behind the other, and are cut, gathered and reduced together.

    Attributes:
        parameters: In the order of their places.
        starts: The place of the first number of each.
        size: Numbers, with padding so that all ranks have as many.
        unit: The index of the layer whose parameters they are; None outside of layers.
    """

    parameters: list[nn.Parameter]
    starts: list[int]
    size: int
    unit: int | None


def buffers_of(module: nn.Module, ddp_config: DistributedDataParallelConfig, replicas: int) -> Iterator[Buffer]:
    """Where Megatron-FSDP will put the parameters of a chunk, on the meta device, too."""
    strategy = ddp_config.data_parallel_sharding_strategy
    policy = core_buffers.BucketingPolicy(ddp_config.bucket_size, units(ddp_config), strategy)
    for group in core_buffers._get_parameter_groups(module, policy, {})[0]:
        shapes = [parameter.shape for parameter in group.params]
        found = core_buffers.build_data_parallel_buffer_index(
            shapes, 0, replicas, True, ddp_config, chunk_size_factor=group.chunk_size_factor
        )
        places, whole = cast(Any, found[0]), found[1]
        starts = [places[index].global_data_index for index in range(len(shapes))]
        yield Buffer(group.params, starts, whole.size, group.fsdp_unit_id)


@dataclass(frozen=True)
class InFlight:
    """Numbers that a rank has beside its own at the fullest moment.

    Attributes:
        gathered: Whole weights: those outside of layers, a layer, and what is gathered ahead of it.
        reduced: Whole gradients that wait until they are reduced, and those of a layer, or a buffer, more.
    """

    gathered: int
    reduced: int


def in_flight(ddp_config: DistributedDataParallelConfig, buffers: Sequence[Buffer]) -> InFlight:
    """The most that Megatron-FSDP lets be under way: usually the whole of a model of less than 500M parameters."""
    layers: dict[int, int] = {}
    for buffer in buffers:
        if buffer.unit is not None:
            layers[buffer.unit] = layers.get(buffer.unit, 0) + buffer.size
    outside = [buffer.size for buffer in buffers if buffer.unit is None]
    inside, layer = sum(layers.values()), max(layers.values(), default=0)
    ahead = ddp_config.suggested_communication_unit_size
    if ahead is None:
        ahead = max(1_000_000_000, 2 * inside // max(len(layers), 1))  # at least so much; its comment says at most
    gathered = sum(outside) + min(inside, layer + ahead // 2)
    return InFlight(gathered, min(sum(outside) + inside, max(layer, *outside, 0) + ahead))


def cuts_of(module: nn.Module, ddp_config: DistributedDataParallelConfig, replicas: int) -> dict[str, Cuts]:
    """The rows of each parameter that each of ``replicas`` ranks will keep.

    Raises:
        UserError: a parameter would be cut inside a row.
    """
    names = {parameter: name for name, parameter in module.named_parameters()}
    return {
        names[parameter]: _cut(names[parameter], tuple(parameter.shape), start, buffer.size // replicas, replicas)
        for buffer in buffers_of(module, ddp_config, replicas)
        for parameter, start in zip(buffer.parameters, buffer.starts, strict=True)
    }


def _cut(name: str, shape: tuple[int, ...], start: int, share: int, replicas: int) -> Cuts:
    size, row = prod(shape), max(1, prod(shape[1:]))
    bounds = [min(max(rank * share - start, 0), size) for rank in range(replicas + 1)]
    if any(bound % row for bound in bounds):
        raise UserError(
            f"ddp.use_megatron_fsdp=True would cut {name} of shape {shape} inside a row, which no checkpoint "
            "describes: use dist.use_torch_fsdp2=true or ddp.use_distributed_optimizer=true instead"
        )
    rows = [bound // row for bound in bounds]
    return tuple(range(first, end) for first, end in pairwise(rows))
