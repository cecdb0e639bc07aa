# SPDX-License-Identifier: Apache-2.0
"""Save a model without memory: its parameters are computed when the writer of the checkpoint needs them.

The state to save belongs to a model on the meta device: it has all names, shapes and offsets, so the plan and the files
are byte for byte those of a model in memory. Only the values are computed later, a few parameters at a time.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from megatron.bridge.utils.console import track
from megatron.bridge.utils.errors import UserError
from megatron.bridge.utils.prefetch import prefetch

THREADS = 2  # one copies while the other waits for the disk


@dataclass(frozen=True, eq=False)
class LazyParameter:
    """The source of the values of a parameter."""

    size: int  # bytes of the parameter
    make: Callable[
        [], torch.Tensor
    ]  # makes it, in the memory of the CPU, contiguous; called from any thread


def storage_id(tensor: torch.Tensor) -> int:
    """An id that a parameter and all views of it share, also on the meta device."""
    return tensor.untyped_storage()._cdata


class LazySavePlanner(MCoreSavePlanner):
    """Plans a save of tensors on the meta device, and gives the writer their values.

    Args:
        sources: By ``storage_of`` each parameter that the state may hold, or a view of it.
        show_progress: Draw a progress bar on rank 0.
        limit: Bytes of parameters that exist at a time, or one parameter that is larger.
    """

    def __init__(
        self, sources: Mapping[int, LazyParameter], show_progress: bool, limit: int
    ) -> None:
        super().__init__(
            dedup_replicated_tensors=False, flatten_state_dict=False, flatten_sharded_tensors=False
        )
        self._sources = sources
        self._show_progress = show_progress
        self._limit = limit
        self._made: Iterator[torch.Tensor] = iter(())
        self._storage: int | None = None
        self._parameter = self._given = torch.empty(0)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Record the order of the plan, in which the writer asks for values."""
        plan = super().finish_plan(new_plan)
        items_and_data = (
            (item, super(LazySavePlanner, self).resolve_data(item)) for item in plan.items
        )
        sources = [
            self._source(item, data)
            for item, data in items_and_data
            if isinstance(data, torch.Tensor)
        ]
        order = [source for source, _ in groupby(sources)]
        prefetched = prefetch(
            [(source.size, source.make) for source in order], self._limit, THREADS
        )
        self._made = track(prefetched, "Converting", total=len(order), show=self._show_progress)
        return plan

    def _source(self, item: WriteItem, data: torch.Tensor) -> LazyParameter:
        if storage_id(data) not in self._sources:
            raise UserError(
                f"{item.index.fqn} is no view of a parameter, so it cannot be written without the model: build it "
                "with to_megatron_model and save it with save_megatron_model"
            )
        return self._sources[storage_id(data)]

    def resolve_data(self, write_item: WriteItem) -> Any:
        """The values of one item; values returned earlier have been written, and are freed."""
        data = super().resolve_data(write_item)
        if not isinstance(data, torch.Tensor):
            return data
        # torch's writer keeps every tensor until it closes the file
        self._given.untyped_storage().resize_(0)
        if self._storage != storage_id(data):
            self._parameter = self._given = torch.empty(0)  # let go before the next is waited for
            self._storage, self._parameter = storage_id(data), next(self._made)
        part = self._parameter.as_strided(data.size(), data.stride(), data.storage_offset())
        self._given = part if part.nbytes == self._parameter.nbytes else part.clone()
        return self._given
