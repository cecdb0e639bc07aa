# SPDX-License-Identifier: Apache-2.0
"""Convert full checkpoints with only a few parameters in memory at a time.

Both directions start from the model on the meta device, which has all names, shapes and offsets. A parameter is
allocated when it is needed and freed after it has been written.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from megatron.bridge.backends.cpu import allocator
from megatron.bridge.checkpoint import loading, model_io
from megatron.bridge.checkpoint.lazy_planner import LazyParameter, LazySavePlanner, storage_id
from megatron.bridge.models.conversion.engine import load, stored_provider
from megatron.bridge.models.conversion.engine.plan import ConversionPlan, WeightConversionTask
from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.models.hf_pretrained import PreTrainedCausalLM
from megatron.bridge.models.model_provider import to_half_precision
from megatron.bridge.utils import distributed
from megatron.bridge.utils.errors import UserError
from megatron.bridge.utils.prefetch import prefetch

AHEAD = 512 << 20  # bytes of parameters in memory at a time, unless one is larger
_READERS = 1  # torch's reader holds the GIL for much of the time


def planner(
    bridge: MegatronModelBridge,
    plan: ConversionPlan,
    chunks: Sequence[nn.Module],
    pretrained: PreTrainedCausalLM,
    show_progress: bool,
) -> LazySavePlanner:
    """Return a save planner that computes the values of ``chunks`` from a Hugging Face model.

    ``plan`` is the plan of these chunks as built, before conversion to half precision. ``chunks`` are on the meta
    device in the precision to save.
    """
    allocator.release_freed_memory()
    sources: dict[int, LazyParameter] = {}
    held = [_chunk_state(chunk) for chunk in chunks]
    note = load.InvalidNote()
    for task in load.checked(bridge, plan, pretrained.state, pretrained.declared_dtype):
        stored = held[task.vp_stage][task.param_name]
        make = partial(_make_parameter, bridge, task, pretrained, stored.dtype, note)
        sources[storage_id(stored)] = LazyParameter(stored.nbytes, make)
    return LazySavePlanner(sources, show_progress, AHEAD)


def _chunk_state(chunk: nn.Module) -> dict[str, Tensor]:
    bare = model_io.unwrap(chunk)
    return {**dict(bare.named_parameters(remove_duplicate=False)), **dict(bare.named_buffers())}


def _make_parameter(
    bridge: MegatronModelBridge,
    task: WeightConversionTask,
    pretrained: PreTrainedCausalLM,
    dtype: torch.dtype,
    note: load.InvalidNote,
) -> Tensor:
    outline = cast(Tensor, task.param_weight)
    parameter = torch.empty(task.shard.shape, dtype=outline.dtype, device="cpu")
    note.add(load.fill(bridge, replace(task, param_weight=parameter), pretrained.state))
    return parameter.to(dtype)


class StoredModel:
    """The weights of a Megatron checkpoint in the layout of ``chunks`` on the meta device, read a few at a time."""

    def __init__(self, chunks: Sequence[nn.Module], path: str | Path) -> None:
        allocator.release_freed_memory()
        self._directory, metadata = model_io.examine(chunks, path)
        states = model_io.model_state(chunks, metadata)
        loading.check(states, self._directory, known=model_io.BESIDE_WEIGHTS)
        self._states: list[dict[str, Any]] = [states[key] for key in model_io.chunk_keys(chunks)]
        self._device = (
            _joining_device()
        )  # here, because torch.cuda.current_device() is 0 in the reader threads

    def filled(self, tasks: Iterable[WeightConversionTask]) -> Iterator[WeightConversionTask]:
        """Yield the tasks in order with the values of parameters; release each before asking for the next.

        Raises:
            UserError: the checkpoint cannot be read. With several ranks, the error follows the last task, because other
                ranks wait for this rank's part of each task.
        """
        batches = _batch_tasks(tasks, AHEAD // 2)
        calls = ((size, partial(self._read, batch)) for batch, size in batches)
        failure: UserError | None = None
        for read_batch in prefetch(calls, AHEAD, _READERS):
            failure = failure or read_batch.failure
            if failure is not None and distributed.world_size() == 1:
                raise failure
            while read_batch.tasks:
                yield read_batch.tasks.pop(0)
        if failure is not None:
            raise failure

    def _read(self, tasks: list[WeightConversionTask]) -> "_Batch":
        """Return the tasks with values; tasks of other ranks, and tasks that are not exported, are unchanged."""
        entries: dict[str, Any] = {}
        for index, task in enumerate(tasks):
            if _is_read(task):
                entry = copy(self._states[task.vp_stage][task.param_name])
                entry.data = torch.empty(task.shard.shape, dtype=task.dtype, device=self._device)
                entries[str(index)] = entry
        values: dict[str, Any] = {name: entry.data for name, entry in entries.items()}
        failure = None
        try:
            values |= loading.read(entries, self._directory) if entries else {}
        except UserError as error:
            failure = error
        return _Batch(
            [
                replace(task, param_weight=values[str(index)]) if str(index) in values else task
                for index, task in enumerate(tasks)
            ],
            failure,
        )


def stored_model(
    path: str | Path, mp_overrides: Mapping[str, Any] | None, default: stored_provider.MakeProvider
) -> tuple[list[Any], StoredModel]:
    """Return a checkpoint's chunks on the meta device and their values; see ``stored_provider.read_for_layout``."""
    outline = stored_provider.read_for_layout(path, mp_overrides, default).meta_model()
    chunks = to_half_precision(outline, outline[0].config)
    return chunks, StoredModel(chunks, path)


@dataclass
class _Batch:
    """Tasks that were read together; ``failure`` is the reason why their values are invalid, if any."""

    tasks: list[WeightConversionTask]
    failure: UserError | None


def _is_read(task: WeightConversionTask) -> bool:
    return task.param_weight is not None and not task.is_copy


def _joining_device() -> Any:
    """Return the device on which parameters are joined: with several ranks, the device that they communicate on."""
    return "cpu" if distributed.world_size() == 1 else torch.cuda.current_device()


def _batch_tasks(
    tasks: Iterable[WeightConversionTask], limit: int
) -> Iterator[tuple[list[WeightConversionTask], int]]:
    """Yield groups of tasks of up to ``limit`` bytes on this rank, or one larger task, with their bytes."""
    batch: list[WeightConversionTask] = []
    held = 0
    for task in tasks:
        size = torch.Size(task.shard.shape).numel() * task.dtype.itemsize if _is_read(task) else 0
        if batch and held + size > limit:
            yield batch, held
            batch = []
            held = 0
        batch.append(task)
        held += size
    if batch:
        yield batch, held
