# SPDX-License-Identifier: Apache-2.0
"""A signal that any rank may get."""

import signal
import threading
from types import FrameType
from typing import Any, Self

from megatron.bridge.utils.distributed import all_gather_object


class DistributedSignalHandler:
    """Notes a signal while its context lasts; only the main thread can install it, elsewhere nothing is noted."""

    def __init__(self, sig: int = signal.SIGTERM) -> None:
        self.sig = sig
        self.released = True
        self._signal_received = False
        self._before: Any = None

    def signals_received(self) -> list[bool]:
        """Whether each rank got the signal, in rank order; all ranks call this."""
        return all_gather_object(self._signal_received)

    def __enter__(self) -> Self:
        self._signal_received = False
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(self.sig, self._note)
            self.released = False
        return self

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self._signal_received = True

    def release(self) -> None:
        """Restore the handler from before."""
        if not self.released:
            signal.signal(self.sig, self._before)
        self.released = True

    def __exit__(self, *error: object) -> None:
        self.release()
