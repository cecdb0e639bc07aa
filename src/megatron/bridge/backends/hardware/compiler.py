# SPDX-License-Identifier: Apache-2.0
"""Check whether torch.compile can make kernels for this machine's GPU, and limit its processes.

Megatron-Core is not imported here, because its import depends on the answer.
"""

import functools
import os
import shutil
import sysconfig
from pathlib import Path

import torch
from torch.utils._triton import has_triton

from megatron.bridge.utils import torchrun_env

WORKERS_VARIABLE = "TORCHINDUCTOR_COMPILE_THREADS"
_MOST_WORKERS = 32  # Inductor's own limit for one process


@functools.cache
def why_not_compiled() -> str | None:
    """Return the reason why Triton cannot compile kernels here, or None if it can."""
    if not has_triton():
        return "Triton is not available"
    if os.environ.get("CC") is None and not any(map(shutil.which, ("gcc", "clang"))):
        return "Triton needs a C compiler (gcc, clang, or the one in CC)"
    header = python_header()
    return (
        None
        if header.exists()
        else f"Triton needs Python's headers (python3-dev), and {header} is missing"
    )


def lacks_compiler() -> bool:
    """Return whether there is a GPU for which Triton cannot compile; the first kernel would raise an error."""
    return torch.cuda.is_available() and why_not_compiled() is not None


def python_header() -> Path:
    """Return the path of this interpreter's ``Python.h``, which Triton includes in the launcher of a kernel."""
    scheme = sysconfig.get_default_scheme()
    # Debian's scheme for packages; Triton also searches next to the interpreter
    paths = sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)
    return Path(paths["include"], "Python.h")


def share_cores() -> None:
    """Divide this machine's cores among the compile workers of its ranks, unless the user set their number.

    Inductor starts a worker for each core and rank: 8 ranks on 64 cores would start 256 processes. It reads the
    variable when it is first imported. Slurm's tasks are not counted, because srun binds each to its own cores.
    """
    ranks = max(1, torchrun_env.read_number("LOCAL_WORLD_SIZE", 1))
    if ranks > 1:
        cores = len(os.sched_getaffinity(0))
        os.environ.setdefault(WORKERS_VARIABLE, str(max(1, min(_MOST_WORKERS, cores // ranks))))
