# SPDX-License-Identifier: Apache-2.0
"""A rank of a run with nvidia-resiliency-ext: ``python -m ... KIND FOLDER``; its results go to FOLDER."""

import os
import pickle
import sys
import time
from pathlib import Path

import torch

from megatron.bridge.training.callbacks import Callback
from megatron.bridge.training.config import FaultToleranceConfig, InProcessRestartConfig
from tests.functional_tests.checkpoint.runs import DROPOUT, STEPS, run_to

PLAIN = {"model": DROPOUT, "ddp": {"use_distributed_optimizer": True}}
QUICK = InProcessRestartConfig(
    last_call_wait=0.2, monitor_thread_interval=0.2, monitor_process_interval=0.2
)
IN_MEMORY = {"non_persistent_ckpt_type": "in_memory", "non_persistent_save_interval": 1}


class FailsOnce(Callback):
    """Raises an error on one rank, the first time that it comes to a step."""

    def __init__(self):
        self.failed = False
        self.started = []
        self.at = 0.0

    def on_train_start(self, context):
        self.started.append(context.progress.step)

    def on_grads_ready(self, context):
        if context.progress.step == 4 and os.environ["RANK"] == "1" and not self.failed:
            self.failed = True
            self.at = time.monotonic()
            raise RuntimeError("this rank fails")

    def on_train_step_end(self, context):
        if self.at:
            sys.stderr.write(
                f"the next step ended {time.monotonic() - self.at:.1f} s after the error\n"
            )
            self.at = 0.0


class Slowly(Callback):
    """Gives a fault time to come after the first checkpoint."""

    def on_train_step_end(self, context):
        fault = Path(context.config.checkpoint.save) / "simulated_fault.json"
        if context.progress.step == 4:
            while not fault.exists():
                pass


def restarted(folder, **saving):
    """Fails once in this process."""
    fails = FailsOnce()
    arguments = {
        **PLAIN,
        "checkpoint": {"save_interval": 3, **saving},
        "inprocess_restart": QUICK,
        "extra": [fails],
    }
    return run_to(folder / "run", STEPS, arguments), fails.started


def relaunched(folder, kind):
    """Is killed or stopped in its first process."""
    ft = FaultToleranceConfig(
        simulate_fault=True,
        simulated_fault_type=kind,
        simulated_fault_rank=1,
        simulated_fault_base_delay=0.5,
    )
    arguments = {**PLAIN, "checkpoint": {"save_interval": 3}, "ft": ft, "extra": [Slowly()]}
    return run_to(folder / "run", STEPS, arguments), []


def in_background(folder):
    """Saves through a process of nvidia-resiliency-ext, and goes on from the second one."""
    options = {"save_interval": 2, "async_save": True, "async_strategy": "nvrx"}
    first = run_to(folder / "run", STEPS, {**PLAIN, "checkpoint": options})
    return first, [
        step for step in range(STEPS + 1) if (folder / "run" / f"iter_{step:07}").exists()
    ]


KINDS = {
    "in_background": in_background,
    "exception": restarted,
    "in_memory": lambda folder: restarted(folder, **IN_MEMORY),
    "rank_killed": lambda folder: relaunched(folder, "rank_killed"),
    "rank_hung": lambda folder: relaunched(folder, "rank_hung"),
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    outcome = KINDS[sys.argv[1]](Path(sys.argv[2]))
    (Path(sys.argv[2]) / os.environ["RANK"]).write_bytes(pickle.dumps(outcome))
