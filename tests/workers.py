# SPDX-License-Identifier: Apache-2.0
"""Pools of processes joined over gloo, kept for the whole test session.

Importing torch and Megatron-Core takes seconds in each process, so the workers are started once and every test
sends them a function: ``pool.run(function, *args)`` calls it on all ranks and returns the results in rank order.
The function must be importable (top level of a test module); it finds ``torch.distributed`` initialized and
Megatron's model parallel groups destroyed. Pools of all sizes are the same processes.
"""

import gc
import os
import queue
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch.multiprocessing as mp

import megatron.bridge  # noqa: F401 - makes megatron.core usable without a GPU
from megatron.bridge.utils.processes import free_port

FORGET = "forget"
"""The groups of the function before, once every rank has answered: a process with 60 idle threads of gloo takes 5 to
10 % of a core."""
_overlooked = {
    "modules": 0
}  # how many were imported when the collector last saw them, and some more


class Processes:
    """Processes of all pools, each started when it is first needed."""

    def __init__(self):
        self._context = mp.get_context("spawn")
        self._start_anew()

    def run(self, size, function, args, timeout):
        """What the first ``size`` of them, joined in one group, answer: a dict by rank."""
        if self._group is None or self._group[0] != size:
            self._group = (size, free_port())
        while len(self._processes) < size:
            self._start()
        for inbox in self._inboxes[:size]:
            inbox.put((self._group, function, args))
        answers: dict[int, object] = {}
        while len(answers) < size:
            try:
                rank, ok, value, joined = self._outbox.get(timeout=timeout)
            except queue.Empty:
                self.close()
                raise TimeoutError(
                    f"ranks {set(range(size)) - set(answers)} did not answer"
                ) from None
            if not ok:
                self.close()  # the other ranks may hang in a collective
                raise RuntimeError(f"rank {rank} of {size} failed:\n{value}")
            if not joined:
                self._group = None
            answers[rank] = value
        for inbox in self._inboxes[:size]:
            inbox.put(FORGET)
        return answers

    def close(self):
        """End the processes; the next ``run`` starts new ones."""
        for process in self._processes:
            process.kill()
            process.join()
        self._start_anew()

    def _start_anew(self):
        self._processes, self._inboxes, self._group = [], [], None
        self._outbox = self._context.Queue()

    def _start(self):
        inbox = self._context.Queue()
        process = self._context.Process(
            target=_serve, args=(len(self._processes), inbox, self._outbox), daemon=True
        )
        process.start()
        self._inboxes.append(inbox)
        self._processes.append(process)


class WorkerPool:
    """``size`` processes in one gloo group on the loopback interface."""

    def __init__(self, size: int, processes: Processes):
        self.size = size
        self._processes = processes

    def run(self, function, *args, timeout: float = 240):
        """Results of ``function(*args)`` of every rank; a failure on any rank raises with its traceback."""
        answers = self._processes.run(self.size, function, args, timeout)
        return [answers[rank] for rank in range(self.size)]


def _serve(rank, inbox, outbox):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    group = None
    while True:
        message = inbox.get()
        if message == FORGET:
            forget_model_parallel()
            continue
        asked, function, args = message
        if asked != group:
            _join(rank, *(group := asked))
        try:
            value = function(*args)
            outbox.put((rank, True, value, dist.is_initialized()))
        except BaseException:  # carried to the test
            outbox.put((rank, False, traceback.format_exc(), False))


def _join(rank, size, port):
    import torch.distributed as dist

    leave()
    place = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    os.environ |= {name: str(value) for name, value in place.items()}
    dist.init_process_group("gloo", rank=rank, world_size=size, timeout=timedelta(seconds=120))


def forget_model_parallel():
    """Destroy Megatron's process groups.

    Megatron-Core only forgets them. A set has 60 gloo threads that wake 100 times a second: after a few hundred
    tests there were 4,000 of them, and the machine did nothing else.
    """
    import torch.distributed as dist
    from megatron.core import parallel_state
    from torch.distributed import distributed_c10d

    if not dist.is_initialized():
        return
    parallel_state.destroy_model_parallel()
    groups = [[group] for group in distributed_c10d._world.pg_map if group is not dist.group.WORLD]
    if not groups:
        return
    _clear_wrappers()
    _clear_caches()
    for (group,) in groups:
        dist.destroy_process_group(group)
        del group
    gc.collect()
    _let_go(groups)
    _overlook_modules()


def _clear_wrappers():
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.distributed.fsdp.src.megatron_fsdp import MegatronFSDP

    kinds = (DistributedDataParallel, MegatronFSDP)
    wrappers = [thing for thing in gc.get_objects() if type(thing) in kinds and vars(thing)]
    for wrapper in wrappers:
        # Its gradient hooks live in C++, out of the collector's sight, and keep the wrapper and its groups alive.
        for hook in getattr(wrapper, "grad_acc_hooks", {}).values():
            hook.remove()
        for parameter in (*wrapper.parameters(), *getattr(wrapper, "raw_param", {}).values()):
            parameter.__dict__.clear()
        wrapper.__dict__.clear()


def _clear_caches():
    """Megatron-Core remembers the last 32 rotary embeddings that were called, and what it last counted of experts."""
    from megatron.core.models.common.embeddings import (
        rotary_pos_embedding,
        yarn_rotary_pos_embedding,
    )
    from megatron.core.transformer.moe import moe_logging

    for kind in (
        rotary_pos_embedding.RotaryEmbedding,
        yarn_rotary_pos_embedding.YarnRotaryEmbedding,
    ):
        kind.forward.cache_clear()
    moe_logging.destroy_moe_metrics_tracker()


def _let_go(references):
    """Drop the last reference to each group, all at once: each waits 10 ms for a thread of gloo to wake up."""
    if references:
        with ThreadPoolExecutor(len(references)) as threads:
            list(threads.map(list.clear, references))


def leave():
    """Destroy all process groups of this process, the default one too."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    if not dist.is_initialized():
        return
    forget_model_parallel()
    group = list(distributed_c10d._world.pg_map)
    dist.destroy_process_group()
    _let_go([group])


def _overlook_modules():
    """Keep the collector from going through imported modules again: with transformers, 0.5 s a test."""
    if len(sys.modules) > _overlooked["modules"]:
        _overlooked["modules"] = len(sys.modules) + 20
        gc.freeze()
