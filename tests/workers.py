# SPDX-License-Identifier: Apache-2.0
"""A pool of processes joined over gloo, kept for the whole test session.

Importing torch and Megatron-Core takes seconds in each process, so the workers are started once and every test
sends them a function: ``pool.run(function, *args)`` calls it on all ranks and returns the results in rank order.
The function must be importable (top level of a test module); it finds ``torch.distributed`` initialised and
Megatron's model parallel groups destroyed.
"""

import gc
import os
import queue
import socket
import sys
import traceback
from datetime import timedelta

import torch.multiprocessing as mp

import megatron.bridge  # noqa: F401 - makes megatron.core usable without a GPU

_overlooked = {"modules": 0}  # how many were imported when the collector last saw them, and some more


class WorkerPool:
    """``size`` processes in one gloo group on the loopback interface."""

    def __init__(self, size: int):
        self.size = size
        self._processes = None

    def run(self, function, *args, timeout: float = 240):
        """Results of ``function(*args)`` of every rank; a failure on any rank raises with its traceback."""
        if self._processes is None:
            self._start()
        for inbox in self._inboxes:
            inbox.put((function, args))
        results: dict[int, object] = {}
        while len(results) < self.size:
            try:
                rank, ok, value = self._outbox.get(timeout=timeout)
            except queue.Empty:
                self.close()
                raise TimeoutError(f"ranks {set(range(self.size)) - set(results)} did not answer") from None
            if not ok:
                self.close()  # the other ranks may hang in a collective
                raise RuntimeError(f"rank {rank} of {self.size} failed:\n{value}")
            results[rank] = value
        return [results[rank] for rank in range(self.size)]

    def close(self):
        """End the processes; the next ``run`` starts new ones."""
        for process in self._processes or ():
            process.kill()
            process.join()
        self._processes = None

    def _start(self):
        context = mp.get_context("spawn")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._outbox = context.Queue()
        self._inboxes = [context.Queue() for _ in range(self.size)]
        self._processes = [
            context.Process(target=_serve, args=(rank, self.size, port, inbox, self._outbox), daemon=True)
            for rank, inbox in enumerate(self._inboxes)
        ]
        for process in self._processes:
            process.start()


def _serve(rank, size, port, inbox, outbox):
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=size, timeout=timedelta(seconds=120))
    while True:
        function, args = inbox.get()
        forget_model_parallel()  # of the function before, now that every rank has answered
        try:
            value = function(*args)
            outbox.put((rank, True, value))
        except BaseException:  # carried to the test
            outbox.put((rank, False, traceback.format_exc()))


def forget_model_parallel():
    """Destroy Megatron's process groups.

    Megatron-Core only forgets them. A set has 60 gloo threads that wake 100 times a second: after a few hundred
    tests there were 4,000 of them, and the machine did nothing else.
    """
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.distributed.fsdp.src.megatron_fsdp import MegatronFSDP
    from torch.distributed import distributed_c10d

    kinds = (DistributedDataParallel, MegatronFSDP)
    wrappers = [thing for thing in gc.get_objects() if type(thing) in kinds and vars(thing)]
    for wrapper in wrappers:
        # Its gradient hooks live in C++, out of the collector's sight, and keep the wrapper and its groups alive.
        for hook in getattr(wrapper, "grad_acc_hooks", {}).values():
            hook.remove()
        for parameter in (*wrapper.parameters(), *getattr(wrapper, "raw_param", {}).values()):
            parameter.__dict__.clear()
        wrapper.__dict__.clear()
    parallel_state.destroy_model_parallel()
    for group in list(distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    gc.collect()
    _overlook_modules()


def _overlook_modules():
    """Keep the collector from going through imported modules again: with transformers, 0.5 s a test."""
    if len(sys.modules) > _overlooked["modules"]:
        _overlooked["modules"] = len(sys.modules) + 20
        gc.freeze()
