# SPDX-License-Identifier: Apache-2.0
"""Which of several processes this one is, as torchrun says in the environment, or srun in torchrun's words."""

import os
from collections.abc import Mapping

from megatron.bridge.utils.errors import UserError

NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PORTS = 1 << 16


def read_number(name: str, default: int | None = None, environment: Mapping[str, str] = os.environ) -> int:
    """A number of the environment; ``default`` where it is not set."""
    text = environment.get(name, "" if default is None else str(default))
    if not (text.isascii() and text.isdecimal()):
        said = f"{name}={text!r} in the environment is no number" if text else f"{name} is missing in the environment"
        raise UserError(f"{said}: torchrun or srun sets it; unset RANK to run as a process of its own")
    return int(text)


def check_environment(environment: Mapping[str, str] = os.environ) -> None:
    """Whether the ranks can find each other."""
    missing = [name for name in NEEDED if not environment.get(name)]
    if missing:
        raise UserError(
            f"RANK={environment.get('RANK')} is set without {', '.join(missing)}: start it with torchrun or srun, "
            f"or unset RANK to run as a process of its own"
        )
    rank, world, port = (read_number(name, environment=environment) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    if rank >= world:
        raise UserError(f"RANK={rank} with WORLD_SIZE={world}: ranks are counted from 0 to {world - 1}")
    if not 0 < port < _PORTS:
        raise UserError(f"MASTER_PORT={port}: a port lies between 1 and {_PORTS - 1}")
