# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs on a machine without a GPU: what is captured is a list of operations on fixed memory.

As on a GPU, a capture changes nothing that was there before, and a replay runs the operations of the capture and
nothing of its Python code: it reads the tensors that the capture read, where they were then, and writes its results
where the capture wrote them. A number that is read on the host during the capture is an error.
"""

import collections
import contextlib
from typing import ClassVar

import torch
import torch.distributed as dist
from megatron.core.transformer import cuda_graphs
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves, tree_map_only

SEND = torch.ops.c10d.send.default
READS_A_NUMBER = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default}


class RecordedGraph(TorchDispatchMode):
    """In the place of `torch.cuda.CUDAGraph`."""

    captured: ClassVar = []

    def __init__(self):
        super().__init__()
        self.calls = []
        self.replays = 0
        self._made = set()
        self._before = {}
        RecordedGraph.captured.append(self)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in READS_A_NUMBER:
            raise RuntimeError(f"{func} while a graph is captured: the host waits for the GPU")
        kwargs = kwargs or {}
        given = {place(tensor): tensor for tensor in tensors((args, kwargs))}
        for where, tensor in given.items():
            if where not in self._made and where not in self._before:
                storage = tensor.untyped_storage()
                self._before[where] = storage, storage.clone()
        results = run(func, args, kwargs)
        self._made |= {place(tensor) for tensor in tensors(results)} - given.keys()
        # under other names, because a pipeline stage gives what it has sent other memory
        self.calls.append(
            tree_map_only(torch.Tensor, torch.Tensor.detach, (func, args, kwargs, results))
        )
        return results

    def end_capture(self):
        for storage, before in self._before.values():
            storage.copy_(before)

    def register_generator_state(self, state):
        pass

    @torch.no_grad()
    def replay(self):
        self.replays += 1
        self.sent = []  # a message is lost if nothing holds the work of sending it
        for func, args, kwargs, results in self.calls:
            given = {place(tensor) for tensor in tensors((args, kwargs))}
            found = run(func, args, kwargs)
            if func is SEND:
                self.sent.append(found)
            for old, new in zip(tensors(results), tensors(found), strict=True):
                if place(old) not in given:  # a view is where it was
                    old.copy_(new)


def run(func, args, kwargs):
    """The result of an operation; a collective is over then, but who sends does not wait for who receives."""
    results = func(*args, **kwargs)
    for leaf in tree_leaves(results):
        if isinstance(leaf, torch.ScriptObject) and func is not SEND:
            leaf.wait()
    return results


def tensors(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def place(tensor):
    return tensor.untyped_storage().data_ptr()


def install(monkeypatch):
    """Let Megatron-Core capture `RecordedGraph`."""
    monkeypatch.setattr(RecordedGraph, "captured", [])
    monkeypatch.setattr(torch.cuda, "CUDAGraph", RecordedGraph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    for name in (
        "_cuda_beginAllocateCurrentThreadToPool",
        "_cuda_endAllocateToPool",
        "_cuda_releasePool",
    ):
        monkeypatch.setattr(torch._C, name, lambda *place: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda *device: collections.defaultdict(int))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(
        cuda_graphs, "get_all_rng_states", dict
    )  # these of the CPU are not generators
    monkeypatch.setattr(dist.Work, "wait", unless_captured(dist.Work.wait))
    return RecordedGraph.captured


def unless_captured(wait):
    """In a capture, a collective is over; gloo would wait for another message, or compute what NCCL does not."""

    def call(work, *timeout):
        capturing = any(
            isinstance(mode, RecordedGraph) for mode in _get_current_dispatch_mode_stack()
        )
        return capturing or wait(work, *timeout)

    return call


@contextlib.contextmanager
def capture(graph, **options):
    with graph:
        yield
    graph.end_capture()
