# SPDX-License-Identifier: Apache-2.0
"""Replay decoding steps with one token per text: as CUDA graphs on a GPU, as recorded operators on a CPU.

The number of texts is rounded up, so that few numbers of rows need a graph: to a power of two on a GPU, and on a CPU,
where a row costs time, to a multiple of 8. The additional rows compute tokens that are discarded.

Texts with different adapters need other graphs than texts with one: all rows then go through all of these adapters, and
each row takes the result of its own.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import GlobalMemoryBuffer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron.bridge.backends.cpu import allocator
from megatron.bridge.backends.cpu.device import has_cuda
from megatron.bridge.backends.decoding.op_recorder import record
from megatron.bridge.backends.decoding.piecewise_graph import PiecewiseGraph
from megatron.bridge.backends.decoding.step import ROW_MULTIPLE, SingleTokens
from megatron.bridge.inference.adapter_bank import AdapterNames
from megatron.bridge.inference.decoding_state import DecodingState
from megatron.bridge.inference.scheduler import StepPlan, Work
from megatron.bridge.utils.patching import patched

_Forward = Callable[[], Tensor]

_MOST_MIXED = 8
"""Most adapters of the texts of a replayed step, because all rows go through all of them."""


class DecodingGraphs:
    """The graphs of one model by number of rows and adapters.

    Args:
        chunk: The model of this rank.
        state: Its caches.
        adapters: The adapters of its texts.
        longest: Maximum length of a text.
    """

    def __init__(
        self, chunk: nn.Module, state: DecodingState, adapters: AdapterNames, longest: int
    ) -> None:
        self._chunk = chunk
        self._state = state
        self._adapters = adapters
        self._longest = longest
        self._graphs: dict[tuple[int, tuple[str | None, ...]], _Graph] = {}
        self._mixed: tuple[str, ...] = ()
        self._adapter_changes = adapters.changes
        self._pool: Any = None

    def can_run(self, plan: StepPlan) -> bool:
        """Return whether texts get only single tokens and drafts, and a graph can have all of their adapters."""
        single = all(work.count == 1 and work.samples and not work.scored for work in plan.work)
        if not plan.work or not single:
            return False
        if self._state.has_recurrent_layers and any(work.start == 0 for work in plan.work):
            return False  # the states of these texts are zero
        return len({work.text.adapter for work in plan.work} - {None}) <= _MOST_MIXED

    def run(self, plan: StepPlan) -> Tensor:
        """Return the logits [rows, vocabulary], text after text."""
        self._forget_old_adapters()
        key = self._rows(len(plan.work)), self._adapters_of_graph(plan)
        if key not in self._graphs:
            self._graphs[key] = self._make_graph(*key)
        graph = self._graphs[key]
        graph.set_inputs(plan)
        if graph.calls_python:
            self._begin(graph.inputs, key[1], plan.records_experts)
        return graph.replay()

    def _forget_old_adapters(self) -> None:
        """Discard the graphs of layers whose adapters have been replaced."""
        if self._adapter_changes != self._adapters.changes:
            self._adapter_changes = self._adapters.changes
            self._graphs.clear()
            self._mixed = ()
            self._pool = None

    def _adapters_of_graph(self, plan: StepPlan) -> tuple[str | None, ...]:
        """Return the adapter of all texts, or several adapters that include those of the texts."""
        names = {work.text.adapter for work in plan.work}
        if len(names) == 1:
            return tuple(names)
        named = {name for name in names if name is not None}
        if not named <= set(self._mixed):  # a graph has all that came before, so that there are few
            together = named | set(self._mixed)
            self._mixed = tuple(sorted(together if len(together) <= _MOST_MIXED else named))
        return (None, *self._mixed)

    def _rows(self, texts: int) -> int:
        if has_cuda():
            return max(ROW_MULTIPLE, 1 << (texts - 1).bit_length())
        return self._state.padded_logits(texts)

    def _make_graph(self, rows: int, names: tuple[str | None, ...]) -> "_Graph":
        graph = _Graph(rows, names, self._state)

        def forward() -> Tensor:
            self._begin(graph.inputs, names)
            ids, positions = graph.inputs[0], graph.inputs[1]
            inputs = {"position_ids": positions[None], "attention_mask": None}
            return self._chunk(input_ids=ids[None], runtime_gather_output=True, **inputs)[0]

        # a longer step would free the buffers of sequence parallelism, which a graph goes on writing to
        with patched(parallel_state, _GLOBAL_MEMORY_BUFFER=graph.buffers):
            graph.replay, graph.calls_python = self._capture(forward)
        return graph

    def _begin(
        self, inputs: Tensor, names: tuple[str | None, ...], records_experts: bool = False
    ) -> None:
        """Prepare for a forward pass, or for the code that its replay runs (``run_unrecorded``)."""
        _, positions, keys, slots, numbers = inputs.unbind()
        step = SingleTokens(positions, keys, slots, self._longest)
        self._state.begin(step, None, records_experts)
        if len(names) == 1:
            self._adapters.begin_for_all_rows(names[0])
        else:
            self._adapters.begin_with_masks([name or "" for name in names[1:]], numbers)

    def _capture(self, forward: _Forward) -> tuple[_Forward, bool]:
        """Return a function that repeats ``forward`` and returns its result, and whether it may run Python code."""
        if not has_cuda():
            self._state.when_weights_move(self._graphs.clear)
            allocator.trim()  # the recorder needs 17 MB for 30 layers
            replay = record(forward)
            allocator.trim()
            return replay, True
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        forward()  # compiles kernels and allocates their workspaces
        graph = PiecewiseGraph(self._pool)
        logits = graph.capture(forward)

        def replay_graphs() -> Tensor:
            graph.replay()
            return logits

        return replay_graphs, graph.calls_python


class _Graph:
    """A captured forward pass over ``rows`` texts.

    ``inputs`` [5, rows] has tokens, positions, starts of keys, slots of recurrent states, and the place of the text's
    adapter in ``names`` after the first, or -1.
    """

    replay: _Forward
    calls_python: bool

    def __init__(self, rows: int, names: Sequence[str | None], state: DecodingState) -> None:
        self.buffers = GlobalMemoryBuffer()
        self._padding = 0, 0, state.spare, -1, -1
        self._adapter_numbers = {name: index for index, name in enumerate(names[1:])}
        self.inputs = torch.tensor([self._padding] * rows, device=state.device).t().contiguous()
        self._host = torch.empty(5, rows, dtype=torch.long, pin_memory=self.inputs.is_cuda)

    def set_inputs(self, plan: StepPlan) -> None:
        rows = [self._row(work) for work in plan.work]
        rows += [self._padding] * (self._host.size(1) - len(rows))
        self._host.copy_(torch.tensor(rows).t())
        self.inputs.copy_(self._host, non_blocking=True)

    def _row(self, work: Work) -> tuple[int, ...]:
        text = work.text
        assert text.extent is not None
        assert text.slot is not None
        adapter = self._adapter_numbers.get(text.adapter, -1)
        return work.tokens[0], work.start, text.extent, text.slot, adapter


def find_obstacle(chunks: Sequence[nn.Module], state: DecodingState) -> str | None:
    """Name what in this model or layout cannot be replayed, or return None; all ranks call it together."""
    obstacle = _find_layout_obstacle(chunks, state) or state.find_changing_kernels()
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return obstacle
    obstacles: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(obstacles, obstacle)  # a step has the same rows on all ranks
    return next((text for text in obstacles if text is not None), None)


def _find_layout_obstacle(chunks: Sequence[nn.Module], state: DecodingState) -> str | None:
    config: Any = state.bare[0].config
    if len(chunks) > 1 or config.pipeline_model_parallel_size > 1:
        return "pipeline stages, because hidden states are sent between passes"
    if config.context_parallel_size > 1:
        return "context parallelism"
    if any(isinstance(weight, DTensor) for weight in state.bare[0].parameters()):
        return "fully sharded weights, because layers gather them when they need them"
    group: Any = parallel_state.get_tensor_model_parallel_group()
    if group.size() > 1 and state.device.type == "cuda" and dist.get_backend(group) != "nccl":
        return f"backend {dist.get_backend(group)}, whose collectives a CUDA graph cannot capture"
    return None
