# SPDX-License-Identifier: Apache-2.0
"""A process that ``srun`` started as one of several tasks is given its rank, as torchrun would give it."""

import os
import re
from collections.abc import Mapping, MutableMapping

from megatron.bridge.utils import torchrun_env
from megatron.bridge.utils.errors import UserError

FIRST_PORT, PORTS = 20_000, 20_000
_NAMES = {"RANK": "SLURM_PROCID", "LOCAL_RANK": "SLURM_LOCALID", "WORLD_SIZE": "SLURM_STEP_NUM_TASKS"}


def adopt_slurm_step(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set what torch.distributed reads (``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR``, ...) from the job step.

    Nothing changes under torchrun, which has set it, nor outside a step: ``sbatch`` sets ``SLURM_NTASKS`` for the
    batch script too, which is one process.
    """
    if "RANK" in environment or torchrun_env.read_number("SLURM_STEP_NUM_TASKS", 1, environment) < 2:
        return
    given = {name: _given(environment, name) for name in (*_NAMES.values(), "SLURM_STEP_NODELIST", "SLURM_JOB_ID")}
    environment.update({ours: given[name] for ours, name in _NAMES.items()})
    environment.setdefault("MASTER_ADDR", first_host(given["SLURM_STEP_NODELIST"]))
    # another port after each restart, for the old one may linger
    number = 7 * int(given["SLURM_JOB_ID"]) + int(environment.get("SLURM_RESTART_COUNT", "0"))
    environment.setdefault("MASTER_PORT", str(FIRST_PORT + number % PORTS))


def _given(environment: Mapping[str, str], name: str) -> str:
    if not environment.get(name):
        raise UserError(
            f"{name} is missing in the environment, though SLURM_STEP_NUM_TASKS is set as in a step of srun: "
            f"pass on all that srun sets, or unset SLURM_STEP_NUM_TASKS"
        )
    return environment[name]


def first_host(nodes: str) -> str:
    """The first node of Slurm's shorthand, where rank 0 runs.

    Example:
        >>> first_host("gpu[007-012,020],login1")
        'gpu007'
    """
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", nodes).split(",")[0]
