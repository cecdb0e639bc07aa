# SPDX-License-Identifier: Apache-2.0
"""A process that ``srun`` started as one of several tasks is given its rank, as torchrun would give it."""

import os
import re
from collections.abc import MutableMapping

from megatron.bridge.utils import ranks

FIRST_PORT, PORTS = 20_000, 20_000


def adopt_step(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set what torch.distributed reads (``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR``, ...) from the job step.

    Nothing changes under torchrun, which has set it, nor outside a step: ``sbatch`` sets ``SLURM_NTASKS`` for the
    batch script too, which is one process.
    """
    if "RANK" in environment or ranks.number("SLURM_STEP_NUM_TASKS", 1, environment) < 2:
        return
    environment["RANK"] = environment["SLURM_PROCID"]
    environment["LOCAL_RANK"] = environment["SLURM_LOCALID"]
    environment["WORLD_SIZE"] = environment["SLURM_STEP_NUM_TASKS"]
    environment.setdefault("MASTER_ADDR", first_host(environment["SLURM_STEP_NODELIST"]))
    # another port after each restart, for the old one may linger
    number = 7 * int(environment["SLURM_JOB_ID"]) + int(environment.get("SLURM_RESTART_COUNT", "0"))
    environment.setdefault("MASTER_PORT", str(FIRST_PORT + number % PORTS))


def first_host(nodes: str) -> str:
    """The first node of Slurm's shorthand, where rank 0 runs.

    Example:
        >>> first_host("gpu[007-012,020],login1")
        'gpu007'
    """
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", nodes).split(",")[0]
