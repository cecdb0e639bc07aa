# SPDX-License-Identifier: Apache-2.0
"""How a command ends: one line for a mistake of the user, a traceback for a bug, and the exit code of each."""

import errno
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from megatron.bridge.utils.errors import UserError

# The name on PyPI of another package that also installs ``megatron.bridge``.
OTHER_DISTRIBUTION = "megatron-bridge"

# Rank 0 may start up some seconds later than the others on a loaded machine; torchrun, which looks every 0.1 s,
# stops them once it has spoken.
HEAD_START_SECONDS = 10.0


def exit_code(command: Callable[[], int]) -> int:
    """Run ``command`` and return its exit code: 1 after a ``UserError``, 130 after Ctrl-C.

    141 if nobody reads standard output any more, as of a program that does not handle SIGPIPE. Any other exception
    passes: it is a bug and keeps its traceback. argparse exits with 2 by itself.
    """
    _open_streams()
    try:
        code = command()
    except UserError as error:
        _report(str(error))
        code = 1
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        if not _is_of_output(error):
            raise
        return _without_output(error)
    return _flushed(code)


def _open_streams() -> None:
    """Python has no stream where the shell closed one (``>&-``); what is written there is lost then."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115 - as long as the process


def _is_of_output(error: OSError) -> bool:
    """Whether ``error`` came of printing: a file that cannot be written raises the same."""
    try:
        output = sys.stdout.fileno()
    except OSError:  # not a file, in a test
        return False
    if isinstance(error, BrokenPipeError):
        watch = select.poll()
        watch.register(output, select.POLLOUT)
        return any(event & select.POLLERR for _, event in watch.poll(0))
    return error.errno == errno.ENOSPC and os.fstatvfs(output).f_bavail == 0


def _flushed(code: int) -> int:
    """``code``, if all that was printed has arrived."""
    try:
        sys.stdout.flush()
    except OSError as error:
        return _without_output(error)
    return code


def _without_output(error: OSError) -> int:
    """The exit code where what was printed cannot be written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python tries again at its end
    if isinstance(error, BrokenPipeError):
        return 128 + signal.SIGPIPE
    _report(f"standard output cannot be written: {error.strerror}")
    return 1


def refuse_other_distribution() -> None:
    """Refuse to run beside the other package of the same import name.

    Raises:
        UserError: it is installed in this environment.
    """
    try:
        version = metadata.version(OTHER_DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return
    raise UserError(
        f"{OTHER_DISTRIBUTION} {version} by NVIDIA and hf-megatron-bridge both install megatron.bridge, so one "
        f"overwrites the other: uninstall both with pip, then install the one you want"
    )


def _report(message: str) -> None:
    """Print ``message``, once for all ranks where they all make the same mistake."""
    rank, alone = _rank()
    if rank and not alone:
        # Most mistakes are seen by every rank at once: rank 0 speaks, and torchrun stops the others meanwhile.
        time.sleep(HEAD_START_SECONDS)
    prefix = f"error (rank {rank}): " if rank else "error: "
    for line in message.splitlines():
        sys.stderr.write(prefix + line + "\n")
    sys.stderr.flush()
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        # torchrun ends with a report of its own, many lines long: let it close with this message, in the form of a
        # traceback, about which it has nothing to remark
        told = {"py_callstack": prefix + message, "timestamp": str(int(time.time()))}
        Path(path).write_text(json.dumps({"message": {"message": prefix + message, "extraInfo": told}}))


def _rank() -> tuple[int, bool]:
    """This process's rank, and whether the ranks are already joined, so that one can fail on its own."""
    torch_distributed = sys.modules.get("torch.distributed")  # not imported: then there is no group either
    joined = bool(torch_distributed and torch_distributed.is_available() and torch_distributed.is_initialized())
    rank = os.environ.get("RANK", "0")
    return int(rank) if rank.isdecimal() else 0, joined  # a RANK that is none may be the very mistake
