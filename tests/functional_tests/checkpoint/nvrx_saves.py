# SPDX-License-Identifier: Apache-2.0
"""Saves by a process of nvidia-resiliency-ext, good and bad: ``python -m ... FOLDER`` says what came of each."""

import json
import os
import resource
import signal
import sys
from pathlib import Path

import psutil
import torch

from megatron.bridge.checkpoint import loading, saving, verification
from megatron.bridge.checkpoint.nvrx_writer import NvrxAsyncSaver
from megatron.bridge.utils import distributed

SIZE = 200_000


def sharded(value):
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    return {"weight": ShardedTensor.from_rank_offsets("weight", torch.full((SIZE,), float(value)))}


def attempt(background, directory, value):
    """What became of a save while its source changes, and what is read back."""
    state = sharded(value)
    try:
        saving.save(state, directory, overwrite=True, background=background)
        state["weight"].data.zero_()
        background.poll(wait=True)
    except Exception as error:
        return str(error)
    verification.verify(directory)
    found = sharded(-1)
    loading.load(found, directory)
    return found["weight"].data.unique().tolist()


def main(root):
    distributed.initialize("gloo")
    background, said = NvrxAsyncSaver(), {}
    background.reserve(0)
    said["saved"] = attempt(background, root / "iter_0000001", 1)
    said["saved again"] = attempt(background, root / "iter_0000002", 2)
    writer = background._calls.persistent_caller.process.pid
    before = resource.prlimit(writer, resource.RLIMIT_FSIZE, (SIZE, resource.RLIM_INFINITY))
    said["no space"] = attempt(background, root / "iter_0000003", 3)
    resource.prlimit(writer, resource.RLIMIT_FSIZE, before)
    for child in psutil.Process().children():
        child.terminate()
    said["terminated"] = attempt(background, root / "iter_0000004", 4)
    os.kill(writer, signal.SIGKILL)
    said["killed"] = attempt(background, root / "iter_0000005", 5)
    background.abort()
    said["after that"] = attempt(background, root / "iter_0000006", 6)
    said["folders"] = sorted(path.name for path in root.iterdir())
    said["processes"] = [child.pid for child in psutil.Process().children()]
    sys.stdout.write(json.dumps(said))
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
