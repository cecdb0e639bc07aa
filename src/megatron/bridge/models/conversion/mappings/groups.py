# SPDX-License-Identifier: Apache-2.0
"""The process groups over which a mapping's parameter is spread, for programs outside of this package.

A program may replace the groups and ``gather_from_tp_ranks`` on a copy of a mapping: ``megatron_to_hf`` of the
copy then uses what was put there, and communicates no more than that does.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from megatron.bridge.models.conversion.engine import exchange


class _GroupNow:
    """A group that is looked up when it is asked for; an instance may have another one in its place."""

    def __init__(self, find: Callable[[], exchange.Group]) -> None:
        self._find = find

    def __get__(self, mapping: Any, owner: type | None = None) -> Any:
        return self._find()


def _rank_and_size(group: Any) -> tuple[int, int]:
    return (0, 1) if group is None else (group.rank(), group.size())


def _properties(group: str) -> tuple[Any, Any]:
    """This rank in the group of that name, and the size of the group."""
    return (
        property(lambda mapping: _rank_and_size(getattr(mapping, group))[0]),
        property(lambda mapping: _rank_and_size(getattr(mapping, group))[1]),
    )


class MappingGroups:
    """Groups, ranks and sizes of ``megatron_param``."""

    megatron_param: str
    is_stacked: bool

    @property
    def hf_names(self) -> list[str]:
        """The Hugging Face names, without their roles."""
        raise NotImplementedError

    pp_group = _GroupNow(exchange.pipeline_group)
    """The ranks of the other pipeline stages."""
    ep_group = _GroupNow(exchange.expert_group)
    """The ranks that hold other experts."""
    _tp_group = _GroupNow(exchange.tensor_group)
    _etp_group = _GroupNow(exchange.expert_tensor_group)

    @property
    def is_expert(self) -> bool:
        return exchange.is_expert(self.megatron_param)

    @property
    def is_grouped_export(self) -> bool:
        """Whether an export needs the tasks of all experts of a layer in one call."""
        return self.is_stacked

    @property
    def group_key(self) -> str:
        """The same for all tasks that an export needs in one call; different for others."""
        return ",".join(self.hf_names)

    @property
    def tp_group(self) -> Any:
        """The ranks that the parameter is cut over."""
        return self._etp_group if self.is_expert else self._tp_group

    tp_rank, tp_size = _properties("tp_group")
    pp_rank, pp_size = _properties("pp_group")
    ep_rank, ep_size = _properties("ep_group")

    def gather_from_tp_ranks(self, tensor: Tensor) -> list[Tensor]:
        """The shards of all ranks of ``tp_group``, in rank order; a collective."""
        return exchange.all_gather(tensor, self.tp_group, self.tp_size)
