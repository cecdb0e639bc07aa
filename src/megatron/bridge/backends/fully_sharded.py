# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingTypeStubs=false
"""Parameters of which each rank keeps some whole rows, whichever wrapper cut them.

The wrappers are `megatron.bridge.backends.torch_fsdp2` and `megatron.bridge.backends.megatron_fsdp`. What ranks
keep are fp32 master weights; a checkpoint holds whole tensors in the model's own dtype, described by the rows of
each rank, so that any layout reads what any other wrote.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_STORED = "fully_sharded_as"  # attribute of a parameter: the dtype in which a checkpoint holds it
_CUTS = "fully_sharded_rows"  # the rows of each rank, in the order of ranks
_COMPUTED = "fully_sharded_copy"  # this rank's rows of what the model computes with, if that is kept beside


@dataclass(frozen=True)
class Marks:
    """What Megatron-Core and this module know of a parameter, which sharding loses.

    Attributes:
        attributes: Megatron-Core's, and the dtype that the parameter has in a checkpoint.
    """

    attributes: dict[str, Any]

    @classmethod
    def of(cls, parameter: Tensor) -> "Marks":
        """Those of a parameter that is about to be sharded."""
        return cls({**vars(parameter), _STORED: parameter.dtype})

    def put(self, parameter: Tensor, cuts: tuple[range, ...], computed: Tensor | None = None) -> None:
        """Mark the sharded parameter.

        Args:
            parameter: Of master weights.
            cuts: The rows of each rank, in the order of ranks.
            computed: This rank's rows of what the model computes with, if that is no cast of the master weights
                in each forward pass but a copy that is kept.
        """
        vars(parameter).update(self.attributes)
        setattr(parameter, _CUTS, cuts)
        setattr(parameter, _COMPUTED, computed)
        assert len(rows_of(cast(DTensor, parameter))) == local(parameter).shape[0], "another rank's rows"


def local(tensor: Tensor) -> Tensor:
    """This rank's rows, sharing memory; any other tensor as it is."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(parameter: Tensor) -> Tensor:
    """A parameter as a checkpoint holds it, gathered: collective over the ranks that share it."""
    if not isinstance(parameter, DTensor):
        return parameter
    mine, cuts = local(parameter).to(stored_dtype(parameter)), _cuts(parameter)
    longest = max(map(len, cuts))
    padded = mine.new_zeros(longest, *mine.shape[1:])
    padded[: len(mine)] = mine
    parts = [torch.empty_like(padded) for _ in cuts]
    dist.all_gather(parts, padded, parameter.device_mesh.get_group())
    return torch.cat([part[: len(rows)] for part, rows in zip(parts, cuts, strict=True)])


def keep(parameter: DTensor, values: Tensor) -> None:
    """Set this rank's rows of a parameter whose values are given in full."""
    rows = rows_of(parameter)
    local(parameter).copy_(values[rows.start : rows.stop])
    _follow(parameter)


def follow(chunk: nn.Module) -> None:
    """Let a chunk compute with its master weights as they are now."""
    for parameter in chunk.parameters():
        if isinstance(parameter, DTensor):
            _follow(parameter)


@torch.no_grad()
def _follow(parameter: DTensor) -> None:
    computed = cast(Tensor | None, getattr(parameter, _COMPUTED))
    if computed is not None:
        computed.copy_(local(parameter))


def stored_dtype(parameter: Tensor) -> torch.dtype:
    """The dtype in which a checkpoint holds a parameter; that of its master weights may be wider."""
    return getattr(parameter, _STORED, parameter.dtype)


def rows_of(parameter: DTensor) -> range:
    """Which rows this rank keeps."""
    return _cuts(parameter)[parameter.device_mesh.get_local_rank()]


def _cuts(parameter: DTensor) -> tuple[range, ...]:
    return getattr(parameter, _CUTS)


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
    row = max(1, prod(parameter.shape[1:]))
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
