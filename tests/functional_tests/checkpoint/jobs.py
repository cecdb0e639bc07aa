# SPDX-License-Identifier: Apache-2.0
"""Jobs of real processes that can be killed at a chosen point, as a machine that loses power would kill them."""

import multiprocessing
import os
import pickle
import shutil
import signal
import time
from dataclasses import dataclass

from megatron.bridge.checkpoint import bucket, paths
from megatron.bridge.checkpoint.hashing_writer import HashingWriter
from megatron.bridge.utils import atomic, storage
from megatron.bridge.utils.processes import free_port
from tests.functional_tests.checkpoint.runs import DROPOUT, STEPS, Series, run_to

# A server that has imported everything forks each process in milliseconds.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.functional_tests.checkpoint.jobs"])

SAVES = {"model": dict(DROPOUT), "checkpoint": {"save_interval": 2, "most_recent_k": 2}}


@dataclass(frozen=True)
class Kill:
    """SIGKILL to ``rank`` at its ``count``-th pass of a point."""

    point: str
    count: int = 1
    rank: int = 0


# Point -> where the function lies that is about to be called.
POINTS = {
    "write shards": (HashingWriter, "write_data"),
    "write metadata": (HashingWriter, "finish"),
    "publish": (atomic, "publish"),
    "move the tracker": (paths, "write_tracker"),
    "delete an old one": (shutil, "rmtree"),
    "upload": (storage, "push"),
    "publish in the bucket": (bucket, "publish"),
    "delete in the bucket": (storage, "delete"),
}


class Killing(Series):
    """Dies at an event of the loop."""

    @property
    def name(self):
        return "Series"  # its state belongs to the run, whoever watches it

    def __init__(self, kill):
        super().__init__()
        self.kill = kill

    def on_train_step_start(self, context):
        self._die_at("start a step", context.progress.step)

    def on_grads_ready(self, context):
        self._die_at("gradients ready", context.progress.step)

    def _die_at(self, point, step):
        if (point, step) == (self.kill.point, self.kill.count):
            os.kill(os.getpid(), signal.SIGKILL)


def run_job(world, root, arguments, results, kill=None, after=None):
    """Run a job of ``world`` processes to its end or its death.

    Args:
        world: Number of processes.
        root: The run's folder.
        arguments: As ``run_to`` takes them.
        results: Folder for what each rank returns.
        kill: Where one rank kills itself; the others are killed then, as launchers do.
        after: Or: seconds after which all are killed.

    Returns:
        What ``run_to`` returned on each rank, or None if the job was killed.
    """
    shutil.rmtree(results, ignore_errors=True)
    results.mkdir()
    port = free_port()
    ranks = [
        CONTEXT.Process(
            target=_rank, args=(rank, world, port, root, arguments, results, kill), daemon=True
        )
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    died = _wait(ranks, after)
    for process in ranks:
        process.kill()
        process.join()
    if died:
        return None
    assert all(process.exitcode == 0 for process in ranks), [process.exitcode for process in ranks]
    return [pickle.loads((results / str(rank)).read_bytes()) for rank in range(world)]


def _wait(ranks, after):
    """Whether a rank was killed, or the time was up, before all had ended."""
    start = time.monotonic()
    while any(process.is_alive() for process in ranks):
        if any(process.exitcode == -signal.SIGKILL for process in ranks):
            return True
        if after is not None and time.monotonic() - start > after:
            return True
        assert all(process.exitcode in (0, None) for process in ranks), "a rank failed"
        assert time.monotonic() - start < 240, "the job hangs"
        time.sleep(0.02)
    return any(process.exitcode == -signal.SIGKILL for process in ranks)


def _rank(rank, world, port, root, arguments, results, kill):
    import torch

    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    arguments = dict(arguments)
    os.environ |= arguments.pop("environment", {})
    if kill is not None and kill.rank == rank:
        if kill.point in POINTS:
            _arm(kill)
        else:
            arguments = {**arguments, "series": Killing(kill)}
    (results / str(rank)).write_bytes(pickle.dumps(run_to(root, STEPS, arguments)))


def _arm(kill):
    owner, name = POINTS[kill.point]
    function = getattr(owner, name)
    passes = 0

    def deadly(*args, **kwargs):
        nonlocal passes
        passes += 1
        if passes == kill.count:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)

    setattr(owner, name, deadly)
