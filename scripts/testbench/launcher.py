# SPDX-License-Identifier: Apache-2.0
"""Runs operators, and writes what was measured beside what the theory says."""

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from megatron.bridge.backends.cpu.device import has_cuda
from megatron.bridge.backends.hardware.speed import matmul_flops
from megatron.bridge.utils import distributed
from megatron.bridge.utils.errors import UserError, did_you_mean
from megatron.bridge.utils.profiler_traces import trace_name
from scripts.testbench import ops as _built_in  # noqa: F401  # registers them
from scripts.testbench.bench import Bench
from scripts.testbench.cases import Case
from scripts.testbench.output import Results
from scripts.testbench.test_op import OPS, Call, TestOp, tensors_of

COLLECT, NSYS, TORCH, SNAPSHOT = range(4)
"""Profile modes: numbers, Nsight Systems, PyTorch's profiler, a snapshot of the GPU's memory."""


@dataclass(frozen=True)
class Launcher:
    """Runs operators on all ranks at once."""

    bench: Bench
    folder: Path  # of this model's results
    mode: int = COLLECT
    repeats: int = 5  # timed calls, after one that is not counted
    theoretical_activations: bool = True
    theoretical_flops: bool = False

    def run(self, names: Sequence[str], cases: Iterable[Case]) -> "Results":
        """Run the operators ``names``, or all that the model has; the results are written, too."""
        _check(names, self.mode)
        rate = 0.0 if self.mode != COLLECT else matmul_flops(self.bench.dtype)
        results = Results(self.folder / "collect_data" / f"rank_{distributed.rank()}")
        for case in cases:
            self.bench.select(case)
            for name in names or [name for name, op in OPS.items() if op.is_in(self.bench)]:
                if not OPS[name].is_in(self.bench):
                    raise UserError(
                        f"--ops {name}: {type(self.bench.chunk).__name__} has no such part in this layout"
                    )
                self._run_op(name, OPS[name], case, results, rate)
        if self.mode == COLLECT:
            results.write()
        return results

    def _run_op(self, name: str, op: TestOp, case: Case, results: Results, rate: float) -> None:
        if self.mode != COLLECT:
            self._profile(name, op)
            return
        flops = op.calc_theoretical_flops(self.bench)
        for direction, seconds in _times(op, self.bench, self.repeats).items():
            work = flops[direction]
            results.add(
                "timing", name, case, direction, seconds, work / rate if work else None, "s"
            )
        memory = op.calc_theoretical_memory(self.bench)
        results.add(
            "memory_weights", name, case, None, op.weights(self.bench), memory["weights"], "bytes"
        )
        if self.theoretical_activations and op.backward:
            kept = kept_bytes(op.prepare_input(self.bench))
            results.add("memory_activation", name, case, None, kept, memory["activations"], "bytes")
        if self.theoretical_flops and op.backward:
            counted = counted_flops(op.prepare_input(self.bench))
            for direction, work in flops.items():
                results.add("flops", name, case, direction, counted[direction], work, "operations")

    def _profile(self, name: str, op: TestOp) -> None:
        with ExitStack() as stack:
            {NSYS: _nsys, TORCH: self._traced, SNAPSHOT: self._snapshot}[self.mode](name, stack)
            for _ in range(self.repeats):
                _passes(op, op.prepare_input(self.bench))

    def _traced(self, name: str, stack: ExitStack) -> None:
        target = self.folder / "torch_profiler" / name
        target.mkdir(parents=True, exist_ok=True)
        kinds = [
            torch.profiler.ProfilerActivity.CPU,
            *[torch.profiler.ProfilerActivity.CUDA] * has_cuda(),
        ]
        profiler = torch.profiler.profile(activities=kinds, record_shapes=True, acc_events=True)
        stack.callback(
            lambda: profiler.export_chrome_trace(str(target / trace_name(distributed.rank())))
        )
        stack.enter_context(profiler)

    def _snapshot(self, name: str, stack: ExitStack) -> None:
        target = self.folder / "memory_snapshot" / name
        target.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._record_memory_history()
        stack.callback(torch.cuda.memory._record_memory_history, enabled=None)
        stack.callback(
            torch.cuda.memory._dump_snapshot, str(target / f"rank_{distributed.rank()}.pickle")
        )


def _nsys(name: str, stack: ExitStack) -> None:
    """A range that ``nsys profile -c cudaProfilerApi`` records."""
    torch.cuda.profiler.start()
    torch.cuda.nvtx.range_push(name)
    stack.callback(torch.cuda.profiler.stop)
    stack.callback(torch.cuda.nvtx.range_pop)


def _check(names: Sequence[str], mode: int) -> None:
    for name in names:
        if name not in OPS:
            raise UserError(
                f"--ops {name}: there is no such operator{did_you_mean(name, OPS)}; known: {', '.join(OPS)}"
            )
    if mode in (NSYS, SNAPSHOT) and not has_cuda():
        what = "Nsight Systems" if mode == NSYS else "a memory snapshot"
        raise UserError(
            f"--profile-mode {mode}: {what} needs a GPU; use 0 (numbers) or 2 (PyTorch's profiler)"
        )


def _times(op: TestOp, bench: Bench, repeats: int) -> dict[str, float]:
    """Median seconds of the passes over some calls, after one that is not counted."""
    call = op.prepare_input(bench)
    found = [_passes(op, call) for _ in range(repeats + 1)][1:]
    return {
        direction: statistics.median(each[direction] for each in found) for direction in found[0]
    }


def _passes(op: TestOp, call: Call) -> dict[str, float]:
    """Seconds of a forward and a backward pass; all ranks start together."""
    if dist.get_world_size() > 1:
        dist.barrier()
    found: dict[str, float] = {}
    outputs = _clocked(found, "forward", call)
    outputs = [each for each in tensors_of(outputs) if each.requires_grad] if op.backward else []
    if outputs:
        gradients = [torch.ones_like(output) for output in outputs]
        _clocked(found, "backward", lambda: torch.autograd.backward(outputs, gradients))
    return found


def _clocked(found: dict[str, float], name: str, call: Callable[[], Any]) -> Any:
    torch.cuda.synchronize()
    start = time.perf_counter()
    result = call()
    torch.cuda.synchronize()
    found[name] = time.perf_counter() - start
    return result


def kept_bytes(call: Call) -> int:
    """Bytes of the storages that autograd keeps for the backward pass of ``call``, parameters left out."""
    kept: dict[int, int] = {}
    parameters = {
        each.untyped_storage().data_ptr()
        for each in gc.get_objects()
        if type(each) is torch.nn.Parameter
    }

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = call()  # alive until the end, so that no address is used twice
        total = sum(kept.values())
        del output
    return total


def counted_flops(call: Call) -> dict[str, int]:
    """Operations of matrix products and attention as PyTorch counts them, by direction."""
    with FlopCounterMode(display=False) as forward:
        outputs = [each for each in tensors_of(call()) if each.requires_grad]
    with FlopCounterMode(display=False) as backward:
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
    return {"forward": forward.get_total_flops(), "backward": backward.get_total_flops()}
