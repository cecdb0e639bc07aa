# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingImports=false
"""Start the tasks that make shards on Slurm or Ray, through datatrove."""

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from megatron.bridge.data.pretraining.shards import make_shards
from megatron.bridge.utils.errors import one_line

POLL_SECONDS, MISSED_POLLS = 2.0, 150  # Slurm's controller may be unreachable for five minutes
TASKS_PER_WORKER = 4  # a worker that finishes early starts another task, which takes seconds


def make_share(plan: str, shares: list[list[int]], _: Any, rank: int, world_size: int) -> None:
    """A step of a datatrove pipeline: each rank makes its share of the shards."""
    make_shards(Path(plan), shares[rank])


def main() -> None:
    """Do the work that standard input describes."""
    work = json.load(sys.stdin)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    count = min(len(work["missing"]), TASKS_PER_WORKER * work["workers"])
    common = {
        "pipeline": [
            partial(
                make_share, work["plan"], [work["missing"][rank::count] for rank in range(count)]
            )
        ],
        "tasks": count,
        "workers": work["workers"],
        "skip_completed": False,  # the shards themselves are the record of finished work
        "logging_dir": f"{work['plan'].removesuffix('.manifest.json')}.shards/{work['executor']}-{os.getpid()}",
    }
    try:
        _run_slurm(common, work["sbatch"]) if work["executor"] == "slurm" else _run_ray(common)
    except Exception as error:
        sys.exit(f"{type(error).__name__}: {one_line(error)}")


def _run_ray(common: dict[str, Any]) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if "RAY_ADDRESS" not in os.environ:
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = (
            "0"  # Ray's name for a cluster on the loopback address
        )
    import ray
    from datatrove.executor import RayPipelineExecutor

    ray.init(os.environ.get("RAY_ADDRESS", "local"), log_to_driver=False)
    RayPipelineExecutor(**common, mem_per_cpu_gb=1).run()


def _run_slurm(common: dict[str, Any], sbatch: dict[str, str]) -> None:
    from datatrove.executor import SlurmPipelineExecutor

    slurm_options = {name: sbatch.pop(name, "") for name in ("partition", "time", "qos")}
    name = f"preprocess-{os.getpid()}-{int(time.time())}"
    path = f"export PATH='{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}'"
    executor = SlurmPipelineExecutor(
        **common, **slurm_options, job_name=name, env_command=path, sbatch_args=sbatch
    )
    executor.launch_merge_stats = partial(
        list
    )  # no job for datatrove's statistics, which are empty
    try:
        executor.run()
        _wait_for(name)
    finally:
        subprocess.run(["scancel", f"--name={name}"], check=False)


def _wait_for(name: str) -> None:
    missed = 0
    while missed < MISSED_POLLS:
        queue = subprocess.run(["squeue", "-h", "-n", name], capture_output=True, check=False)
        if not queue.returncode and not queue.stdout.strip():
            return
        missed = missed + 1 if queue.returncode else 0
        time.sleep(POLL_SECONDS)
    raise ConnectionError("Slurm's controller does not answer squeue")
