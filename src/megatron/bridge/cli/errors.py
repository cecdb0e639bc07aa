# SPDX-License-Identifier: Apache-2.0
"""How a command ends: one line for a mistake of the user, a traceback for a bug, and the exit code of each."""

import json
import os
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

    Any other exception passes: it is a bug and keeps its traceback. argparse exits with 2 by itself.
    """
    try:
        return command()
    except UserError as error:
        _report(str(error))
        return 1
    except KeyboardInterrupt:
        return 130


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
        # torchrun ends with a report of its own, many lines long: let it close with this message
        Path(path).write_text(json.dumps({"message": prefix + message, "timestamp": int(time.time())}))


def _rank() -> tuple[int, bool]:
    """This process's rank, and whether the ranks are already joined, so that one can fail on its own."""
    torch_distributed = sys.modules.get("torch.distributed")  # not imported: then there is no group either
    joined = bool(torch_distributed and torch_distributed.is_available() and torch_distributed.is_initialized())
    return int(os.environ.get("RANK", "0")), joined
