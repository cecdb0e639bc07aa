# SPDX-License-Identifier: Apache-2.0
"""The usual forward step, but step 4 of a run waits until somebody tells its process to leave; and a slow one."""

import signal
import time

from megatron.bridge.training.gpt_step import forward_step as usual

STEP = 3  # before it, as many are done
_told: list[int] = []
_watched: list[object] = []


def forward_step(state, data_iterator, model):
    if not _watched:
        _watch()
    while state.progress.step == STEP and not _told:
        time.sleep(0.05)
    return usual(data_iterator, model)


def slow_forward_step(data_iterator, model):
    time.sleep(0.5)
    return usual(data_iterator, model)


def _watch():
    """Note SIGTERM, and hand it on to whoever listened before."""
    before = signal.getsignal(signal.SIGTERM)

    def handle(number, frame):
        _told.append(number)
        before(number, frame)

    _watched.append(signal.signal(signal.SIGTERM, handle))
