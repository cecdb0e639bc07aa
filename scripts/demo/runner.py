# SPDX-License-Identifier: Apache-2.0
"""Runs the commands of the demo one after the other, shows each before it runs, and keeps the logs."""

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from megatron.bridge.utils.errors import UserError

PROCESSES = 2
LOG_LINES_ON_ERROR = 20


class Runner:
    """Numbers the stages and runs their commands."""

    def __init__(self, logs: Path, stages: int) -> None:
        self.logs = logs
        self.stages = stages
        self.current = 0
        self.seconds = 0.0  # of the last stage

    @contextmanager
    def stage(self, title: str) -> Iterator[None]:
        """Print ``title`` at the start and the seconds at the end."""
        self.current += 1
        started = time.perf_counter()
        say(f"[{self.current}/{self.stages}] {title}")
        yield
        self.seconds = time.perf_counter() - started
        say(f"      done in {self.seconds:.0f} s")

    def run(self, *command: str | Path, live: bool = False) -> None:
        """Run ``command``; its output goes to the log of the stage and, with ``live``, to the terminal.

        Raises:
            UserError: the command failed. The end of its log is printed first.
        """
        words = [str(word) for word in command]
        say(f"      $ {as_typed(words)}")
        log = self.logs / f"{self.current}.log"
        with log.open("a") as file:
            file.write(f"$ {shlex.join(words)}\n")
            code = _run_logged(words, file, live)
        if code:
            tail = log.read_text(errors="replace").splitlines()[-LOG_LINES_ON_ERROR:]
            say("\n".join(f"      | {line}" for line in tail))
            raise UserError(
                f"stage {self.current} of the demo failed with exit code {code}: its log is {log}"
            )


def megatron_bridge(*words: str) -> list[str]:
    """The ``megatron-bridge`` command of this environment."""
    return [sys.executable, "-m", "megatron.bridge.cli.main", *words]


def torchrun() -> list[str]:
    """``torchrun`` of this environment; it picks a free port."""
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={PROCESSES}",
    ]


def as_typed(words: list[str]) -> str:
    """A command as a user would type it in this folder."""
    text = shlex.join(words)
    for long, short in (
        (f"{sys.executable} -m megatron.bridge.cli.main", "megatron-bridge"),
        (f"{sys.executable} -m torch.distributed.run", "torchrun"),
        (sys.executable, "python"),
        (f"{Path.cwd()}/", ""),
    ):
        text = text.replace(long, short)
    return text


def say(text: str) -> None:
    """Print at once, also into a pipe."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _run_logged(words: list[str], log: IO[str], live: bool) -> int:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    if live:
        environment.setdefault("OMP_NUM_THREADS", "1")  # torchrun sets it too, but prints a warning
    with subprocess.Popen(
        words, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace",
    ) as process:  # fmt: skip
        for line in process.stdout or ():
            log.write(line)
            if live:
                say(f"      {line.rstrip()}")
    return process.returncode
