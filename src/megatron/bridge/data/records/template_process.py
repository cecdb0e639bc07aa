# SPDX-License-Identifier: Apache-2.0
"""A process that renders chat templates for the threads of this one, and that the system ends when they take too long.

It reads pickles from its parent, which trusts itself, and answers with lines of JSON. It ends when its parent does,
because that closes the pipe.
"""

import contextlib
import json
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any, BinaryIO

from megatron.bridge.data.records.template_sandbox import (
    CPU_SECONDS,
    MEMORY,
    RenderedText,
    limit_memory,
    render_here,
)
from megatron.bridge.utils.errors import one_line


class TemplateProcess:
    """The other process, started with the first conversation and after each end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None  # guarded by the lock

    def render(
        self, arguments: Mapping[str, Any], cpu_seconds: float = CPU_SECONDS
    ) -> RenderedText:
        """Call ``render_here(**arguments)`` in the other process, one call at a time.

        Raises:
            TimeoutError: The template takes too long.
            MemoryError: The template needs too much memory.
            ValueError: The template refuses the conversation, or is wrong.
        """
        request = pickle.dumps((cpu_seconds, arguments))
        with self._lock:
            child = self._running_child()
            line = _ask_child(child, request)
            if not line.endswith(b"\n"):
                raise _end_reason(child, cpu_seconds)
        answer = json.loads(line)
        if "error" in answer:
            error = MemoryError if answer["kind"] == "MemoryError" else ValueError
            raise error(answer["error"])
        return RenderedText(answer["text"], [(start, end) for start, end in answer["spans"]])

    def _running_child(self) -> "subprocess.Popen[bytes]":
        if self._child is None or self._child.poll() is not None:
            # the parent may have found this package by entries of ``sys.path`` alone
            path = os.pathsep.join(entry for entry in sys.path if entry)
            self._child = subprocess.Popen(
                [sys.executable, "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": path},
            )
        return self._child


PROCESS = TemplateProcess()


def _ask_child(child: "subprocess.Popen[bytes]", request: bytes) -> bytes:
    """Return the line of the answer; part of one or nothing if the process has ended."""
    assert child.stdin is not None
    assert child.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        child.stdin.write(len(request).to_bytes(8, "big") + request)
        child.stdin.flush()
    return child.stdout.readline()


def _end_reason(child: "subprocess.Popen[bytes]", cpu_seconds: float) -> Exception:
    code = child.wait()
    if code == -signal.SIGXCPU:
        return TimeoutError(f"it takes more than {cpu_seconds:.0f} s")
    return MemoryError(f"the process that runs it has ended with exit code {code}")


def main() -> None:
    """Answer requests until the parent closes the pipe."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the signal at the limit would write one
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    requests = sys.stdin.buffer
    answers = sys.stdout.buffer
    sys.stdout = sys.stderr  # whatever is printed is no answer
    limits_are_set = False
    while (request := _read_request(requests)) is not None:
        if not limits_are_set:
            import transformers.utils.chat_template_utils  # noqa: F401 - imported before the limits

            limit_memory(MEMORY)
            limits_are_set = True
        cpu_seconds, arguments = request
        _limit_time(cpu_seconds)
        answers.write(json.dumps(_answer_request(arguments)).encode() + b"\n")
        answers.flush()


def _read_request(requests: BinaryIO) -> Any:
    """Return the next request; None at the end."""
    size = requests.read(8)
    return pickle.loads(requests.read(int.from_bytes(size, "big"))) if size else None


def _limit_time(cpu_seconds: float) -> None:
    """Let the system end this process, also within a single operation, after further seconds of CPU time."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(used.ru_utime + used.ru_stime + cpu_seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def _answer_request(arguments: Mapping[str, Any]) -> dict[str, Any]:
    try:
        text, spans = render_here(**arguments)
    except Exception as error:  # the template is a program of its own
        return {"error": one_line(error) or type(error).__name__, "kind": type(error).__name__}
    return {"text": text, "spans": spans}


if __name__ == "__main__":
    main()
