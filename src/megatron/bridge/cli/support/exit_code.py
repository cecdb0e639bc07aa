# SPDX-License-Identifier: Apache-2.0
"""How a command ends: one line for a user error, a traceback for a bug, and the exit code of each."""

import errno
import json
import os
import re
import select
import signal
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from megatron.bridge.cli.support import failure, machine_limits
from megatron.bridge.utils.errors import UserError

# The PyPI name of NVIDIA's package, which also installs ``megatron.bridge``.
OTHER_DISTRIBUTION = "megatron-bridge"

# On a loaded machine, rank 0 may start some seconds later than the others. torchrun polls every 0.1 s and stops
# them once rank 0 has failed.
HEAD_START_SECONDS = 10.0

# what gloo and NCCL raise on a rank whose partner has ended, or whose network is down
_LOST = re.compile(
    r"gloo.*(Connection (?:closed|reset) by peer|Broken pipe|No route to host|timed out)|ncclRemoteError",
    re.IGNORECASE,
)


def exit_code(command: Callable[[], int]) -> int:
    """Run ``command`` and return its exit code.

    The code is 1 after a ``UserError``, after a loss or gradient that is not finite and after another rank was
    lost, 130 after Ctrl-C, and 141 after the reader of standard output closed the pipe, like a program that does
    not handle SIGPIPE. Any other exception is a bug and keeps its traceback. argparse exits with 2 by itself.
    """
    _open_streams()
    machine_limits.raise_limit_of_open_files()
    try:
        return _flushed(command())
    except (UserError, FloatingPointError) as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if isinstance(error, OSError) and _is_of_output(error):
            return _without_output(error)
        sentence = machine_limits.describe_shortage(error)
        if sentence is not None:
            return _fail(sentence)
        lost = isinstance(error, RuntimeError) and _rank()[1] and _LOST.search(str(error))
        if lost:
            _report(_of_lost_rank(lost.group(1) or lost.group()))
            return 1
        failure.announce(_rank()[0], f"{type(error).__name__}: {error}")
        raise


def _fail(sentence: str) -> int:
    """Print ``sentence``, tell it to the other ranks, and return the exit code of a failure."""
    failure.announce(_rank()[0], sentence)
    _report(sentence)
    return 1


def _of_lost_rank(reason: str) -> str:
    cause = failure.read_announcement()
    if cause is not None:
        return f"stopped because another rank failed: {cause}"
    return (
        f"lost the connection to another rank ({reason}), which has ended or whose node cannot be reached: its "
        f"own log says why; repeat the command to resume from the last checkpoint"
    )


def _open_streams() -> None:
    """Open streams that the shell closed (``>&-``), for which Python has none; their output is discarded."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115 - open as long as the process runs


def _is_of_output(error: OSError) -> bool:
    """Whether ``error`` comes from standard output and not from another file that cannot be written."""
    try:
        output = sys.stdout.fileno()
    except OSError:  # standard output of a test is not a file
        return False
    if isinstance(error, BrokenPipeError):
        watch = select.poll()
        watch.register(output, select.POLLOUT)
        return any(event & select.POLLERR for _, event in watch.poll(0))
    if error.errno != errno.ENOSPC:
        return False
    return _is_full(output)


def _is_full(output: int) -> bool:
    """Return whether nothing can be written to a file, although it is open."""
    try:
        os.write(output, b"")  # no effect on a file; ``/dev/full`` refuses even this
    except OSError as error:
        return error.errno == errno.ENOSPC
    return os.fstatvfs(output).f_bavail == 0


def _flushed(code: int) -> int:
    """Flush standard output; return ``code``, or another exit code if the output cannot be written."""
    try:
        sys.stdout.flush()
    except OSError as error:
        return _without_output(error)
    return code


def _without_output(error: OSError) -> int:
    """Discard the rest of the output, and return the exit code for output that cannot be written."""
    os.dup2(
        os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
    )  # otherwise Python tries again when it exits
    if isinstance(error, BrokenPipeError):
        return 128 + signal.SIGPIPE
    _report(f"standard output cannot be written: {error.strerror}")
    return 1


def refuse_other_distribution() -> None:
    """Refuse to run if NVIDIA's package of the same import name is installed."""
    try:
        version = metadata.version(OTHER_DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return
    raise UserError(
        f"{OTHER_DISTRIBUTION} {version} by NVIDIA and hf-megatron-bridge both install megatron.bridge, so one "
        f"overwrites the other: uninstall both with pip, then install the one you want"
    )


def _report(message: str) -> None:
    """Print ``message``, once if all ranks fail with the same error."""
    rank, alone = _rank()
    if rank and not alone:
        # Most user errors occur on every rank at once: rank 0 prints, and torchrun stops the others meanwhile.
        time.sleep(HEAD_START_SECONDS)
    prefix = f"error (rank {rank}): " if rank else "error: "
    for line in message.splitlines():
        sys.stderr.write(prefix + line + "\n")
    sys.stderr.flush()
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        # torchrun prints a long report of its own: this makes the message its last line, in the form that torchrun
        # expects of a traceback
        info = {"py_callstack": prefix + message, "timestamp": str(int(time.time()))}
        Path(path).write_text(
            json.dumps({"message": {"message": prefix + message, "extraInfo": info}})
        )


def _rank() -> tuple[int, bool]:
    """This process's rank, and whether the process group exists, so that one rank can fail alone."""
    torch_distributed = sys.modules.get(
        "torch.distributed"
    )  # if it is not imported, there is no group
    joined = bool(
        torch_distributed
        and torch_distributed.is_available()
        and torch_distributed.is_initialized()
    )
    rank = os.environ.get("RANK", "0")
    return int(
        rank
    ) if rank.isdecimal() else 0, joined  # an invalid RANK may be the error to report
