# SPDX-License-Identifier: Apache-2.0
"""Replay decoding steps with one token per text: as CUDA graphs on a GPU, as recorded operators on a CPU.

The number of texts is rounded up, so that few numbers of rows need a graph: to a power of two on a GPU, and on a CPU,
where a row costs time, to a multiple of 8. The additional rows compute tokens that are discarded.
"""

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.bridge.backends.cpu import allocator
from megatron.bridge.backends.cpu.device import has_cuda
from megatron.bridge.backends.decoding.op_recorder import record
from megatron.bridge.backends.decoding.step import ROW_MULTIPLE, SingleTokens
from megatron.bridge.inference.decoding_state import DecodingState
from megatron.bridge.inference.scheduler import StepPlan

_Forward = Callable[[], Tensor]


class DecodingGraphs:
    """The graphs of one model by number of rows; ``longest`` is the maximum length of a text."""

    def __init__(self, chunk: nn.Module, state: DecodingState, longest: int) -> None:
        self._chunk = chunk
        self._state = state
        self._longest = longest
        self._graphs: dict[int, _Graph] = {}
        self._pool: Any = None

    @classmethod
    def of(cls, chunks: Sequence[nn.Module], state: DecodingState, longest: int) -> Self | None:
        """Return the graphs if this is the only process and its steps always launch the same kernels; else None."""
        alone = len(chunks) == 1 and (not dist.is_initialized() or dist.get_world_size() == 1)
        return cls(chunks[0], state, longest) if alone and state.repeats_kernels else None

    def can_run(self, plan: StepPlan) -> bool:
        """Return whether texts get only single tokens and drafts."""
        return bool(plan.work) and all(
            work.count == 1 and work.samples and not work.scored for work in plan.work
        )

    def run(self, plan: StepPlan) -> Tensor:
        """Return the logits [rows, vocabulary], text after text."""
        rows = self._rows(len(plan.work))
        if rows not in self._graphs:
            self._graphs[rows] = _Graph(
                rows, self._state, self._longest, self._chunk, self._capture
            )
        return self._graphs[rows].run(plan)

    def _rows(self, texts: int) -> int:
        if has_cuda():
            return max(ROW_MULTIPLE, 1 << (texts - 1).bit_length())
        return self._state.padded_logits(texts)

    def _capture(self, forward: _Forward) -> _Forward:
        """Return a function that repeats ``forward`` and returns its result."""
        if not has_cuda():
            self._state.when_weights_move(self._graphs.clear)
            allocator.trim()  # the recorder needs 17 MB for 30 layers
            replay = record(forward)
            allocator.trim()
            return replay
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        forward()  # compiles kernels and allocates their workspaces
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits = forward()

        def replay() -> Tensor:
            graph.replay()
            return logits

        return replay


class _Graph:
    """A captured forward pass over ``rows`` texts; its input [3, rows] has tokens, positions, and starts of keys."""

    def __init__(
        self,
        rows: int,
        state: DecodingState,
        longest: int,
        chunk: nn.Module,
        capture: Callable[[_Forward], _Forward],
    ) -> None:
        self._numbers = torch.zeros(3, rows, dtype=torch.long, device=state.device)
        self._numbers[2] = self._spare = state.spare
        self._host = torch.empty(3, rows, dtype=torch.long, pin_memory=self._numbers.is_cuda)
        self._replay = capture(lambda: _run_chunk(chunk, state, self._numbers, longest))

    def run(self, plan: StepPlan) -> Tensor:
        texts = [(work.tokens[0], work.start, work.text.extent) for work in plan.work]
        texts += [(0, 0, self._spare)] * (self._host.size(1) - len(texts))
        self._host.copy_(torch.tensor(texts).t())
        self._numbers.copy_(self._host, non_blocking=True)
        return self._replay()


def _run_chunk(chunk: nn.Module, state: DecodingState, numbers: Tensor, longest: int) -> Tensor:
    ids, positions, keys = numbers.unbind()
    step = SingleTokens(positions, keys, longest)
    state.begin(step, None)
    inputs = {"position_ids": positions[None], "attention_mask": None}
    return chunk(input_ids=ids[None], runtime_gather_output=True, **inputs)[0]
