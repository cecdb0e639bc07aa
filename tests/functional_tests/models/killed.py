# SPDX-License-Identifier: Apache-2.0
"""Conversions in forked processes, each killed (as by ``kill -9``) at another moment, then run again unharmed.

``python -m tests.functional_tests.models.killed FOLDER`` prints what was found after each, as JSON. Forks are made
before a process group exists, so each is a process as it was after its imports.
"""

import hashlib
import json
import os
import signal
import sys
from pathlib import Path

from megatron.bridge import AutoBridge
from megatron.bridge.checkpoint import manifest, paths
from megatron.bridge.models.conversion.engine import side_files
from megatron.bridge.models.hf_pretrained import model_folder, safetensors_writer
from megatron.bridge.utils import atomic
from tests.toy_models import make_llama

# what is called, and at which of its calls the process dies
IMPORTS = [
    (manifest.HashingStream, "write", 2),
    (manifest.HashingStream, "write", 60),
    (manifest, "write", 1),
    (atomic, "publish", 1),
]
EXPORTS = [
    (safetensors_writer.os, "pwrite", 1),
    (safetensors_writer.os, "pwrite", 9),
    (safetensors_writer, "write_index", 1),
    (side_files.shutil, "copyfile", 1),
    (atomic, "publish", 1),
]


def killed_at(owner, name, number):
    """Have the process end at a call."""
    original, calls = getattr(owner, name), []

    def last(*args, **kwargs):
        calls.append(1)
        if len(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(owner, name, last)


def forked(action, point=None):
    """How a process that does ``action`` ended: 0, or minus the signal."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        if point:
            killed_at(*point)
        action()
        os._exit(0)
    finally:
        os._exit(1)


def hashes(folder):
    """By name the content of all files, but for what names the save."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in (".metadata", manifest.NAME, model_folder.RECORD)
    }


def main(folder):
    """Kill imports and exports at each point, and let the last one of each live."""
    make_llama(folder / "hf", num_hidden_layers=2)
    bridge = AutoBridge.from_hf_pretrained(folder / "hf")
    reference, root, out = folder / "reference", folder / "megatron", folder / "out"
    found = {
        "reference": forked(lambda: AutoBridge.import_ckpt(folder / "hf", reference, False)),
        "import": [],
    }
    for point in IMPORTS:
        ended = forked(lambda: AutoBridge.import_ckpt(folder / "hf", root, False), point)
        found["import"].append(
            (ended, paths.published_iterations(root), (root / paths.TRACKER).exists())
        )
    found["import again"] = forked(lambda: AutoBridge.import_ckpt(folder / "hf", root, False))
    found["import equal"] = hashes(root) == hashes(reference)
    found["export"] = []
    for point in EXPORTS:
        ended = forked(lambda: bridge.export_ckpt(reference, out, False), point)
        found["export"].append((ended, out.exists(), bool(list(folder.glob("out*")))))
    found["export again"] = forked(lambda: bridge.export_ckpt(reference, out, False))
    found["export equal"] = hashes(out) == hashes(folder / "hf")
    found["left"] = sorted(path.name for path in folder.iterdir())
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
