# SPDX-License-Identifier: Apache-2.0
"""Write parameters directly to Hugging Face files; one rank writes each tensor, or each rank writes its rows."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron.bridge.checkpoint.collective import on_every_rank, on_first_rank, out_of_space
from megatron.bridge.models.conversion.engine import buckets, exchange
from megatron.bridge.models.conversion.engine.plan import ConversionPlan, WeightConversionTask
from megatron.bridge.models.conversion.engine.quantize import AsSource, Quantizer
from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.models.conversion.param_mapping import ShardSpec
from megatron.bridge.models.hf_pretrained import model_folder, safetensors_writer
from megatron.bridge.models.hf_pretrained.causal_lm import to_dtype
from megatron.bridge.models.hf_pretrained.safetensors_files import SafetensorsCheckpoint
from megatron.bridge.models.hf_pretrained.safetensors_writer import FileLayout, Writer
from megatron.bridge.utils import distributed
from megatron.bridge.utils.errors import UserError, first_few

Specs = dict[str, tuple[torch.dtype, tuple[int, ...]]]  # dtypes and shapes of tensors by name
THREADS = 2
_IN_FLIGHT = 2 * THREADS  # tensors that are gathered but not yet written


@dataclass(frozen=True)
class SaveOptions:
    strict: bool = True  # refuse to write tensors whose names differ from the source's
    # of all floating-point tensors; None takes the source's, or without a source the model's
    dtype: torch.dtype | None = None
    # the ranks that take turns to write joined tensors; None lets every rank write the tensors that it owns
    writers: tuple[int, ...] | None = None
    declared: torch.dtype | None = None  # dtype in the config, for an export without a source
    folder: Path | None = None  # final folder of the files, in which their names must be unused
    quantizer: Quantizer | None = None  # stores some tensors quantized; None writes all in full

    @classmethod
    def of_keywords(
        cls,
        strict: bool,
        dtype: torch.dtype | str | None,
        distributed_save: bool | None,
        every: int,
        folder: Path,
    ) -> "SaveOptions":
        """Return the options that ``AutoBridge.save_hf_weights`` documents."""
        if every < 1 or (every > 1 and not distributed_save):
            raise UserError(
                f"save_every_n_ranks={every} must be at least 1, and above 1 only with distributed_save=True"
            )
        writers = None
        if distributed_save is False:
            writers = (0,)
        elif every > 1:
            writers = tuple(range(0, distributed.world_size(), every))
        return cls(strict, to_dtype(dtype), writers, folder=folder)


def save(
    bridge: MegatronModelBridge,
    plan: ConversionPlan,
    directory: Path,
    source: SafetensorsCheckpoint | None,
    options: SaveOptions,
    tasks: Iterable[WeightConversionTask] | None = None,
) -> None:
    """Write the weights into ``directory``, sharded like the source.

    ``directory`` exists and is equal on all ranks; without a source, the export chooses the shards. ``tasks`` iterates
    over the tasks of the plan one by one, if the plan's own tasks have no values.
    """
    layouts = _rename_files(_output_layouts(bridge, plan, source, options), options.folder)
    on_first_rank(lambda: safetensors_writer.create(directory, layouts))
    is_writer = options.writers is None or distributed.rank() in options.writers
    with Writer(directory, layouts if is_writer else ()) as writer:
        if options.writers is None:
            given = plan.tasks if tasks is None else tasks
            error = _write_all(bridge, plan, given, writer, source, options.quantizer)
        else:
            error = _write_in_turn(bridge, plan, tasks, writer, source, options.writers)
        on_every_rank(lambda: _raise_error(error, directory))
        is_computed = any(_is_computed(bridge, task) for task in plan.tasks)
        if is_computed or options.quantizer is not None:
            _refuse_unwritten(layouts, writer)
    imitated = _imitated_files(source, options)
    on_first_rank(lambda: safetensors_writer.write_index(directory, layouts, imitated))


def _imitated_files(
    source: SafetensorsCheckpoint | None, options: SaveOptions
) -> SafetensorsCheckpoint | None:
    """Return the checkpoint whose files an export imitates."""
    return options.quantizer.stored if isinstance(options.quantizer, AsSource) else source


def check(
    bridge: MegatronModelBridge,
    plan: ConversionPlan,
    source: SafetensorsCheckpoint | None,
    options: SaveOptions,
) -> None:
    """Lay out the files of an export without values, so that tensors without a place are refused."""
    _output_layouts(bridge, plan, source, options)


def _output_layouts(
    bridge: MegatronModelBridge,
    plan: ConversionPlan,
    source: SafetensorsCheckpoint | None,
    options: SaveOptions,
) -> list[FileLayout]:
    entries = {} if source is None else source.entries
    stored = {name: (entry.dtype, entry.shape) for name, entry in entries.items()}
    exported: Specs = {}
    for task in plan.tasks:
        exported |= {} if task.is_copy else _tensor_specs(task, stored, _is_computed(bridge, task))
    if source is None:
        specs = _as_declared(_in_dtype(exported, options.dtype), options)
        if options.quantizer is not None:
            specs = options.quantizer.layout(plan, specs)
        return safetensors_writer.new_output_files(specs)
    exported |= {name: stored[name] for name in plan.buffers if name in stored}
    exported |= {name: exported[same] for name, same in plan.ties.items() if same in exported}
    wrong = sorted((exported.keys() ^ stored.keys()) - plan.heads - plan.replaced)
    if options.strict and wrong:
        raise UserError(
            f"the export would differ from its source in {len(wrong)} tensors, such as {wrong[0]}: "
            "pass the right source, or strict=False"
        )
    specs = _in_dtype(exported, options.dtype)
    if options.quantizer is None:
        return safetensors_writer.output_files_like(source, specs)
    specs = options.quantizer.layout(plan, specs)
    if isinstance(options.quantizer, AsSource):
        return safetensors_writer.output_files_like(options.quantizer.stored, specs)
    return safetensors_writer.new_output_files(specs)


def _is_computed(bridge: MegatronModelBridge, task: WeightConversionTask) -> bool:
    """Return whether a mapping or a hook computes a task's tensors."""
    return bridge.computes_on_export or not task.mapping.copies


def _tensor_specs(task: WeightConversionTask, stored: Specs, computed: bool) -> Specs:
    """Return the tensors that a task writes, with the source's dtypes and, if they are computed, its shapes."""
    names = task.mapping.hf_names
    if computed and all(name in stored for name in names):
        return {name: stored[name] for name in names}
    return {
        name: (stored[name][0] if name in stored else task.dtype, shape)
        for name, shape in task.hf_shapes.items()
    }


def _in_dtype(tensors: Specs, dtype: torch.dtype | None) -> Specs:
    """Return the tensors with ``dtype`` for those of floating point."""
    if dtype is None:
        return tensors
    return {
        name: (dtype if stored_dtype.is_floating_point else stored_dtype, shape)
        for name, (stored_dtype, shape) in tensors.items()
    }


def _as_declared(tensors: Specs, options: SaveOptions) -> Specs:
    """Return the tensors with the config's dtype, except those with a more precise dtype."""
    if options.declared is None or options.dtype is not None or not tensors:
        return tensors
    dtypes = [dtype for dtype, _ in tensors.values()]
    main = max(set(dtypes), key=dtypes.count)
    return {
        name: (options.declared if dtype == main else dtype, shape)
        for name, (dtype, shape) in tensors.items()
    }


def _rename_files(layouts: list[FileLayout], folder: Path | None) -> list[FileLayout]:
    """Rename the files to names that are free in the target directory."""
    if folder is None:
        return layouts
    names = on_first_rank(
        lambda: model_folder.unused_names(folder, [layout.name for layout in layouts])
    )
    return [replace(layout, name=names.get(layout.name, layout.name)) for layout in layouts]


def _write_in_turn(
    bridge: MegatronModelBridge,
    plan: ConversionPlan,
    tasks: Iterable[WeightConversionTask] | None,
    writer: Writer,
    source: SafetensorsCheckpoint | None,
    writers: tuple[int, ...],
) -> BaseException | None:
    """Write full tensors, ranks in turn; return an error instead of raising it: other ranks wait for this one."""
    failure: BaseException | None = None
    for index, (_, (name, weight)) in enumerate(buckets.stream(bridge, plan, source, tasks=tasks)):
        if writers[index % len(writers)] == distributed.rank() and failure is None:
            try:
                _check_place(writer, name, tuple(weight.shape))
                writer.write(name, 0, weight)
            except (OSError, UserError) as error:
                failure = error
    if source is not None and distributed.rank() == writers[0]:
        for name in plan.buffers:
            writer.write(name, 0, source[name])
    return failure


def _write_all(
    bridge: MegatronModelBridge,
    plan: ConversionPlan,
    tasks: Iterable[WeightConversionTask],
    writer: Writer,
    source: SafetensorsCheckpoint | None,
    quantizer: Quantizer | None = None,
) -> BaseException | None:
    """Write this rank's share; return an error instead of raising it: other ranks wait for this rank's shards."""
    free_slots = threading.Semaphore(_IN_FLIGHT)
    errors: list[BaseException] = []

    def finished(future: Future[None]) -> None:
        free_slots.release()
        if error := future.exception():
            errors.append(error)

    with ThreadPoolExecutor(THREADS) as pool:

        def submit(write: Callable[..., None], *arguments: Any) -> None:
            free_slots.acquire()
            pool.submit(write, *arguments).add_done_callback(finished)

        try:
            for index, task in enumerate(map(_with_gathered_parameter, tasks)):
                if errors and distributed.world_size() == 1:
                    break
                here = task.param_weight is not None and exchange.is_first_replica(
                    task.global_param_name
                )
                if (
                    here
                    and not task.is_copy
                    and (parts := _gather_share(bridge, task, index, source, quantizer)) is not None
                ):
                    submit(_write_parts, task, parts, writer, plan.ties, quantizer)
        except UserError as error:  # tasks that read a checkpoint may fail
            errors.append(error)
        for name, tensor in _copied_tensors(plan, source, quantizer):
            submit(writer.write, name, 0, tensor)
    return errors[0] if errors else None


def _copied_tensors(
    plan: ConversionPlan, source: SafetensorsCheckpoint | None, quantizer: Quantizer | None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that the first rank copies from the source."""
    if distributed.rank() != 0:
        return
    if source is not None:
        yield from ((name, source[name]) for name in plan.buffers)
    if quantizer is not None:
        yield from quantizer.copied().items()


def _with_gathered_parameter(task: WeightConversionTask) -> WeightConversionTask:
    """Return the task with a fully sharded parameter gathered; all ranks must call this."""
    sharded = isinstance(task.param_weight, DTensor) and not task.is_copy
    return replace(task, param_weight=task.exported) if sharded else task


Parts = (
    list[tuple[int, Tensor]] | dict[str, Tensor]
)  # shards with their rank, or full tensors by name


@torch.no_grad()
def _gather_share(
    bridge: MegatronModelBridge,
    task: WeightConversionTask,
    index: int,
    source: Mapping[str, Tensor] | None,
    quantizer: Quantizer | None = None,
) -> Parts | None:
    """Return what this rank writes of a task: its own rows, or in its turn the full tensors; otherwise None.

    Tensors that are quantized are always full: their scales depend on rows of other ranks.
    """
    group = exchange.shard_group(task.global_param_name)
    rank, size = exchange.rank_and_size(group)
    receiver = index % size
    if not _is_computed(bridge, task):
        local_shard = cast(Tensor, task.exported)
        parts = task.shard.parts
        is_quantized = quantizer is not None and quantizer.covers(task)
        if parts > 1 and _in_rows(task) and not is_quantized:
            return [(task.shard.part, local_shard)]
        shards = exchange.start_gather(local_shard, group, parts, receiver).wait()
        if shards is not None and is_quantized:
            return task.mapping.join(task.shard, shards)
        return None if shards is None else list(enumerate(shards))
    full_tensors = task.mapping.megatron_to_hf(task.exported, cast(nn.Module, task.megatron_module))
    if bridge.computes_on_export:
        full_tensors = bridge.maybe_modify_converted_hf_weight(task, full_tensors, source or {})
    return full_tensors if rank == receiver else None


def _write_parts(
    task: WeightConversionTask,
    parts: Parts,
    writer: Writer,
    ties: Mapping[str, str],
    quantizer: Quantizer | None = None,
) -> None:
    if isinstance(parts, dict):
        if quantizer is not None:
            parts = quantizer.encode(task, parts)
        for name, weight in parts.items():
            _check_place(writer, name, tuple(weight.shape), task.mapping.expert)
    for name, start, rows in _written_rows(task, parts):
        for alias in (name, *(tied for tied, same in ties.items() if same == name)):
            writer.write(alias, start, rows)


def _check_place(
    writer: Writer, name: str, shape: tuple[int, ...], expert: int | None = None
) -> None:
    """Refuse a tensor, or an expert's part, that has no place in the files."""
    file_shape = writer.shapes.get(name)
    if file_shape is None:
        raise UserError(
            f"the export produced tensor {name}, which has no place in the files: no mapping and no source tensor has "
            "this name; add it to a mapping, or return only the mapping's names from the hook"
        )
    expected_shape = file_shape if expert is None else file_shape[1:]
    if shape != expected_shape:
        raise UserError(
            f"the export produced tensor {name} in shape {list(shape)}, but the files expect {list(expected_shape)}: "
            "return the shape that megatron_to_hf computes from the mapping's hf_slice_shapes(shard)"
        )


def _refuse_unwritten(layouts: list[FileLayout], writer: Writer) -> None:
    """Refuse tensors that no rank wrote."""
    written = set[str]().union(*distributed.all_gather_object(writer.written))
    missing = [name for layout in layouts for name in layout.entries if name not in written]
    if missing:
        raise UserError(
            f"the export did not produce {first_few(missing)}, which the mappings name: return these tensors from "
            "megatron_to_hf and the hook"
        )


def _written_rows(task: WeightConversionTask, parts: Parts) -> Iterator[tuple[str, int, Tensor]]:
    """Yield (tensor, first row, rows): views of the shards if their rows are contiguous, else joined tensors."""
    shard = task.shard
    expert = task.mapping.expert
    if not isinstance(parts, dict) and not _in_rows(task):
        parts = task.mapping.join(shard, [weight for _, weight in parts])
    if isinstance(parts, dict):
        for name, weight in parts.items():
            yield (name, 0, weight) if expert is None else (name, expert, weight[None])
        return
    for rank, weight in parts:
        peer = ShardSpec(shard.shape, shard.kind, rank, shard.size, shard.config)
        for piece in task.mapping.copy_ranges(peer):
            yield piece.hf, piece.source if piece.dim == 0 else 0, piece.of_shard(weight)


def _in_rows(task: WeightConversionTask) -> bool:
    """Return whether each piece of a shard is a range of rows or the full tensor; equal on all ranks."""
    shard = task.shard
    first = ShardSpec(
        shard.shape, shard.kind, 0, shard.size, shard.config
    )  # others may hold only padding
    copy_ranges = task.mapping.copy_ranges(first)
    is_full_tensor = shard.parts == len(copy_ranges) == 1
    return (shard.dim == 0 or is_full_tensor) and all(piece.is_plain for piece in copy_ranges)


def _raise_error(error: BaseException | None, directory: Path) -> None:
    if isinstance(error, OSError) and out_of_space(error):
        raise UserError(
            f"the disk is full: {directory.parent} lacks space for the model; free some or choose another"
        )
    if isinstance(error, OSError):
        raise UserError(f"cannot write to {directory.parent}: {error.strerror}")
    if error is not None:
        raise error
