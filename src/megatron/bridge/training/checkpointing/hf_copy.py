# SPDX-License-Identifier: Apache-2.0
"""Make a Hugging Face copy of a published checkpoint, in a separate process during the training.

The process reads the files of the checkpoint, takes no part in the run's collectives and uses no GPU. It writes
aside and renames the folder at the end, and exits when the process that started it is gone.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from megatron.bridge.checkpoint import manifest, paths
from megatron.bridge.utils import atomic
from megatron.bridge.utils.errors import UserError

_COPY = re.compile(r"hf_(\d{7,})")
_OF_A_JOB = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)


def copy_dir(root: Path, iteration: int) -> Path:
    """The folder of the copy of an iteration.

    Example:
        >>> copy_dir(Path("run"), 10).as_posix()
        'run/hf_0000010'
    """
    return root / f"hf_{iteration:07d}"


def missing(root: Path) -> list[int]:
    """The published iterations without a copy, ascending; one that was saved again since its copy counts."""
    return [
        iteration
        for iteration in paths.published_iterations(root)
        if not _is_current(root, iteration)
    ]


def _is_current(root: Path, iteration: int) -> bool:
    copy = copy_dir(root, iteration)
    written = paths.iteration_dir(root, iteration) / manifest.NAME
    return (
        copy.is_dir()
        and written.is_file()
        and copy.stat().st_mtime_ns >= written.stat().st_mtime_ns
    )


def clean(root: Path) -> None:
    """Remove what a killed process left, and the copies of checkpoints that the run has deleted."""
    published = set(paths.published_iterations(root))
    for path in root.glob("hf_*"):
        name, _, suffix = path.name.partition(".")
        copy_name = _COPY.fullmatch(name)
        if copy_name and (suffix or int(copy_name[1]) not in published):
            shutil.rmtree(path, ignore_errors=True)


class CopyProcess:
    """The process that copies a published iteration, like the Hugging Face model ``source``.

    Without a ``source``, config and tokenizer are made from the checkpoint.
    """

    def __init__(
        self, root: Path, iteration: int, source: str | None, trust_checkpoint: bool
    ) -> None:
        self.checkpoint = paths.iteration_dir(root, iteration)
        self.folder = copy_dir(root, iteration)
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 - open as long as the process
        environment = {name: value for name, value in os.environ.items() if name not in _OF_A_JOB}
        arguments = [
            str(self.checkpoint),
            str(self.folder),
            source or "",
            "trust" if trust_checkpoint else "",
        ]
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, *arguments],
            env={**environment, "CUDA_VISIBLE_DEVICES": ""},
            stdin=subprocess.PIPE,  # its end tells the process that this one is gone
            stdout=subprocess.DEVNULL,
            stderr=self._said,
        )

    def wait(self, seconds: float) -> int | None:
        """The exit code, None if the process has not ended within ``seconds``."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def reason(self) -> str:
        """The last line that the process wrote before it failed."""
        self._said.seek(0)
        return (
            self._said.read().strip().splitlines() or [f"exit code {self._process.returncode}"]
        )[-1]

    def let_go(self) -> None:
        """End the process as the end of this one would."""
        assert self._process.stdin is not None, "the process was started without a pipe"
        self._process.stdin.close()
        self._process.wait()
        self._said.close()


def export(checkpoint: Path, folder: Path, source: str | None) -> None:
    from megatron.bridge import AutoBridge
    from megatron.bridge.models.conversion import describe
    from megatron.bridge.models.conversion.pretrained import tokenizer_of

    saved = manifest.read(checkpoint)
    with (
        tempfile.TemporaryDirectory() as temporary,
        atomic.published_directory(folder, overwrite=True) as staging,
    ):
        if source is None:
            from megatron.bridge.data.tokenizer import load_hf_tokenizer

            name = tokenizer_of(checkpoint)
            source = str(Path(temporary, folder.name))
            Path(source).mkdir()
            tokenizer = None if name is None else load_hf_tokenizer(name)
            describe.write_description(checkpoint, Path(source), None, tokenizer)
        AutoBridge.from_hf_pretrained(source).export_ckpt(checkpoint, staging, show_progress=False)
        if manifest.read(checkpoint) != saved:
            raise UserError(f"{checkpoint} was saved again while it was copied")


def _exit_with_parent() -> None:
    os.read(0, 1)  # no reader of sys.stdin, whose lock would be held when the interpreter ends
    os._exit(1)


def _main(checkpoint: str, folder: str, source: str, trust: str) -> int:
    from megatron.bridge.utils import unpickling

    os.nice(10)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    unpickling.trust_checkpoints(bool(trust))
    try:
        export(Path(checkpoint), Path(folder), source or None)
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
