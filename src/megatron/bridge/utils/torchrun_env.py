# SPDX-License-Identifier: Apache-2.0
"""Read the rank of this process from the environment variables of torchrun or srun."""

import os
import re
from collections.abc import Mapping, MutableMapping

from megatron.bridge.utils.errors import UserError

NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PORTS = 1 << 16


def read_number(
    name: str, default: int | None = None, environment: Mapping[str, str] = os.environ
) -> int:
    """Return a number from an environment variable, or ``default`` if it is not set."""
    text = environment.get(name, "" if default is None else str(default))
    if not (text.isascii() and text.isdecimal()):
        problem = (
            f"{name}={text!r} in the environment is not numeric"
            if text
            else f"{name} is missing in the environment"
        )
        raise UserError(
            f"{problem}: torchrun or srun sets it; unset RANK to run as a single process"
        )
    return int(text)


def check_environment(environment: Mapping[str, str] = os.environ) -> None:
    """Refuse environment variables with which the ranks cannot find each other."""
    missing = [name for name in NEEDED if not environment.get(name)]
    if missing:
        raise UserError(
            f"RANK={environment.get('RANK')} is set without {', '.join(missing)}: start it with torchrun or srun, "
            f"or unset RANK to run as a single process"
        )
    rank, world, port = (
        read_number(name, environment=environment) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")
    )
    if rank >= world:
        raise UserError(
            f"RANK={rank} with WORLD_SIZE={world}: ranks are counted from 0 to {world - 1}"
        )
    if not 0 < port < _PORTS:
        raise UserError(f"MASTER_PORT={port}: a port lies between 1 and {_PORTS - 1}")


FIRST_PORT, PORTS = 20_000, 20_000
_NAMES = {
    "RANK": "SLURM_PROCID",
    "LOCAL_RANK": "SLURM_LOCALID",
    "WORLD_SIZE": "SLURM_STEP_NUM_TASKS",
}


def adopt_slurm_step(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set torch.distributed's variables (``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR``, ...) from the job step.

    Nothing changes under torchrun, which has already set them, or outside a step: ``sbatch`` also sets ``SLURM_NTASKS``
    for the batch script, which is a single process.
    """
    if "RANK" in environment or read_number("SLURM_STEP_NUM_TASKS", 1, environment) < 2:
        return
    given = {
        name: _given_value(environment, name)
        for name in (*_NAMES.values(), "SLURM_STEP_NODELIST", "SLURM_JOB_ID")
    }
    environment.update({torch_name: given[name] for torch_name, name in _NAMES.items()})
    environment.setdefault("MASTER_ADDR", first_host(given["SLURM_STEP_NODELIST"]))
    # use another port after each restart, because the old one may still be in use
    job_number = 7 * int(given["SLURM_JOB_ID"]) + int(environment.get("SLURM_RESTART_COUNT", "0"))
    environment.setdefault("MASTER_PORT", str(FIRST_PORT + job_number % PORTS))


def _given_value(environment: Mapping[str, str], name: str) -> str:
    if not environment.get(name):
        raise UserError(
            f"{name} is missing in the environment, although srun's SLURM_STEP_NUM_TASKS is set: "
            f"pass on all variables that srun sets, or unset SLURM_STEP_NUM_TASKS"
        )
    return environment[name]


def first_host(nodes: str) -> str:
    """Return the first node of Slurm's node list, where rank 0 runs.

    Example:
        >>> first_host("gpu[007-012,020],login1")
        'gpu007'
    """
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", nodes).split(",")[0]
