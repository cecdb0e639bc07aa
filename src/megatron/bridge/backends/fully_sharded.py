# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingTypeStubs=false
"""PyTorch's fully sharded data parallelism (FSDP2) for Megatron-Core's models.

Each rank of a replica group keeps some whole rows of every parameter, of its gradient and of its optimizer state.
Rows of a layer are gathered before it computes, and given back after. Megatron-Core has a wrapper of its own; it
takes CUDA for granted, leaves gradients without the scale of a loss per token, and describes only even shares to a
checkpoint.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

_STORED = "fully_sharded_as"  # attribute of a parameter: the dtype in which a checkpoint holds it


class FullyShardedDataParallel(_BaseDataParallel):
    """A chunk whose parameters are cut over the ranks that would hold the same ones.

    Half precision computes in gathered copies: what a rank keeps are the fp32 master weights, so the optimizer
    needs no others. Gradients of each microbatch are summed over ranks, and over microbatches, in fp32.

    Args:
        config: The model's.
        ddp_config: Kept for Megatron-Core, which looks into it.
        module: The chunk, in half precision where the config says so, with equal weights on all ranks.
    """

    def __init__(
        self, config: TransformerConfig, ddp_config: DistributedDataParallelConfig, module: nn.Module
    ) -> None:
        super().__init__(config=config, module=module)
        self.ddp_config = ddp_config
        group = cast(ProcessGroup, parallel_state.get_data_parallel_group(with_context_parallel=True))
        attributes = {name: _kept(parameter) for name, parameter in module.named_parameters()}
        policy = MixedPrecisionPolicy(
            param_dtype=config.params_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        device = next(module.parameters()).device.type
        # torch takes meshes of the same ranks and names for one, also after the groups of the first are gone
        mesh = DeviceMesh.from_group(group, device, mesh_dim_names=(f"replicas_{group.group_name}",))
        for part in (*_units(module), module):
            fully_shard(part, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
        for name, parameter in module.named_parameters():
            vars(parameter).update(attributes[name])
        # as Megatron-Core's own wrapper: the gradient of a loss per token is a sum, scaled when tokens are counted
        self._reduce_by(1 if config.calculate_per_token_loss else group.size())

    def _reduce_by(self, divisor: int) -> None:
        for part in self.module.modules():
            if isinstance(part, FSDPModule):
                part.set_gradient_divide_factor(float(divisor))
                part.set_force_sum_reduction_for_comms(True)  # gloo cannot divide

    def scale_gradients(self, scaling_factor: float | Tensor) -> None:
        """Multiply this rank's rows of all gradients."""
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                local(parameter.grad).mul_(scaling_factor)

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Nothing: gradients were reduced in the backward pass of each microbatch."""


def _kept(parameter: nn.Parameter) -> dict[str, Any]:
    """Megatron-Core's marks on a parameter, which sharding loses; the parameter becomes its fp32 master."""
    marks = {**vars(parameter), _STORED: parameter.dtype}
    parameter.data = parameter.data.float()
    return marks


def _units(module: nn.Module) -> list[nn.Module]:
    """What is gathered at a time, beside the rest: a tied embedding is the output layer, too, and stays there."""
    tied = any(getattr(part, "share_embeddings_and_output_weights", False) for part in module.modules())
    kinds = (TransformerLayer,) if tied else (TransformerLayer, LanguageModelEmbedding)
    return [part for part in module.modules() if isinstance(part, kinds)]


def local(tensor: Tensor) -> Tensor:
    """This rank's rows, sharing memory; any other tensor as it is."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(parameter: Tensor) -> Tensor:
    """A parameter as a checkpoint holds it, gathered: collective over the ranks that share it."""
    if not isinstance(parameter, DTensor):
        return parameter
    with torch.no_grad():
        return parameter.full_tensor().to(stored_dtype(parameter))


def keep(parameter: DTensor, values: Tensor) -> None:
    """Set this rank's rows of a parameter whose values are given in full."""
    rows = rows_of(parameter)
    local(parameter).copy_(values[rows.start : rows.stop])


def stored_dtype(parameter: Tensor) -> torch.dtype:
    """The dtype in which a checkpoint holds a parameter; that of its master weights may be wider."""
    return getattr(parameter, _STORED, parameter.dtype)


def rows_of(parameter: DTensor) -> range:
    """Which rows this rank keeps: equal shares, but for the last ranks, which may have fewer or none."""
    mesh, total = parameter.device_mesh, parameter.shape[0]
    share = -(-total // mesh.size())
    rows = range(total)[mesh.get_local_rank() * share :][:share]
    assert len(rows) == local(parameter).shape[0], f"{tuple(parameter.shape)} is not cut into rows"
    return rows


def names_of(chunk: nn.Module) -> set[str]:
    """The sharded parameters of a chunk."""
    return {name for name, parameter in chunk.named_parameters() if isinstance(parameter, DTensor)}


# ----------------------------------------------------------------------------------------------- checkpoints


@dataclass
class Rows(ShardedTensorFactory):
    """This rank's rows of a parameter, for a checkpoint.

    Attributes:
        pieces: What lies apart in the checkpoint, as views of the rows: gate and up projections, for one.
    """

    pieces: list[ShardedTensor] = field(default_factory=list[ShardedTensor])


@contextmanager
def described(chunk: nn.Module) -> Iterator[dict[int, DTensor]]:
    """Inside, sharded parameters of ``chunk`` are whole ones without memory, as its modules describe them.

    Yields:
        The parameters under the ids of their stand-ins.
    """
    held = [
        (module, name, parameter)
        for module in chunk.modules()
        for name, parameter in module._parameters.items()
        if isinstance(parameter, DTensor)
    ]
    found: dict[int, DTensor] = {}
    try:
        for module, name, parameter in held:
            module._parameters[name] = stand_in = _stand_in(parameter)
            found[id(stand_in)] = parameter
        yield found
    finally:
        for module, name, parameter in held:
            module._parameters[name] = cast(nn.Parameter, parameter)


def _stand_in(parameter: DTensor) -> nn.Parameter:
    empty = torch.empty(parameter.shape, dtype=stored_dtype(parameter), device="meta")
    stand_in = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    vars(stand_in).update(vars(parameter))
    return stand_in


def cut(state: dict[str, Any], parameters: dict[int, DTensor]) -> dict[str, Any]:
    """The sharded state of a chunk that was described as whole, with the rows of this rank alone.

    Megatron-Core drops what is empty while it loads: a parameter of which this rank has no rows is left out.
    """
    entries = {name: _rows(entry, parameters) for name, entry in state.items()}
    return {name: entry for name, entry in entries.items() if not isinstance(entry, Rows) or entry.pieces}


def _rows(entry: Any, parameters: dict[int, DTensor]) -> Any:
    parameter = parameters.get(id(getattr(entry, "data", None)))
    if parameter is None:
        return entry
    mine, rows, dtype = local(parameter), rows_of(parameter), stored_dtype(parameter)
    whole = [entry] if isinstance(entry, ShardedTensor) else list(nested_values(entry.build()))
    row = max(1, parameter[:1].numel())
    found = [_piece(piece, cast(Tensor, piece.data).storage_offset() // row, mine, rows) for piece in whole]
    pieces = [piece for piece in found if piece is not None]

    def build(*_: Any) -> Any:
        return [replace(piece, data=cast(Tensor, piece.data).to(dtype), dtype=dtype) for piece in pieces]

    def merge(loaded: Any) -> Tensor:
        for piece, stored in zip(pieces, loaded, strict=True):
            master = cast(Tensor, piece.data)
            # what rounds to the stored weight is its master, which was read with the optimizer's state
            master.copy_(torch.where(master.to(dtype) == stored, master, stored.float()))
        return mine

    return Rows(entry.key, mine, cast(Any, build), cast(Any, merge), entry.replica_id, pieces=pieces)


def _piece(piece: ShardedTensor, begin: int, mine: Tensor, rows: range) -> ShardedTensor | None:
    """The rows of one piece that this rank keeps; ``begin`` is where it begins in its parameter."""
    first, end = max(rows.start, begin), min(rows.stop, begin + piece.local_shape[0])
    if first >= end:
        return None
    extra = piece.prepend_axis_num
    offset = list(piece.global_offset)
    offset[extra] += first - begin
    shape = (*(1,) * extra, end - first, *piece.local_shape[1:])
    return replace(
        piece,
        data=mine[first - rows.start : end - rows.start].view(shape),
        dtype=mine.dtype,
        local_shape=shape,
        global_offset=tuple(offset),
        axis_fragmentations=None,
        prepend_axis_num=0,
        replica_id=(*cast(tuple[int, ...], piece.replica_id)[:2], 0),
    )
