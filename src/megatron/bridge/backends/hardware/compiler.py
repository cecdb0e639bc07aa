# SPDX-License-Identifier: Apache-2.0
"""Whether torch.compile can make kernels for this machine's GPU, and with how many processes.

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
    """Why Triton cannot compile kernels here; None if it can."""
    if not has_triton():
        return "Triton is not available"
    if os.environ.get("CC") is None and not any(map(shutil.which, ("gcc", "clang"))):
        return "Triton needs a C compiler (gcc, clang, or the one in CC)"
    header = python_header()
    return None if header.exists() else f"Triton needs Python's headers (python3-dev), and {header} is missing"


def lacks_compiler() -> bool:
    """Whether there is a GPU for which nothing can be compiled; the first kernel would raise an error."""
    return torch.cuda.is_available() and why_not_compiled() is not None


def python_header() -> Path:
    """``Python.h`` of this interpreter, which Triton includes in what launches a kernel."""
    scheme = sysconfig.get_default_scheme()
    # Debian's scheme for packages; Triton looks beside the interpreter, too
    paths = sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)
    return Path(paths["include"], "Python.h")


def share_cores() -> None:
    """Let the ranks of this machine share its cores out among their compile workers, unless the user did.

    Inductor starts a worker for each core and rank: 8 ranks on 64 cores would start 256 processes. It reads the
    variable when it is first imported. Slurm's tasks are not counted, because srun binds each to cores of its own.
    """
    ranks = max(1, torchrun_env.read_number("LOCAL_WORLD_SIZE", 1))
    if ranks > 1:
        cores = len(os.sched_getaffinity(0))
        os.environ.setdefault(WORKERS_VARIABLE, str(max(1, min(_MOST_WORKERS, cores // ranks))))
