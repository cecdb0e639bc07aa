# SPDX-License-Identifier: Apache-2.0
"""Ranks agree on the step after which they stop, also where they look at the answer a step later."""

import signal
from types import SimpleNamespace

import torch.distributed as dist

from megatron.bridge.training.callbacks.guard.preemption import Preemption
from megatron.bridge.training.config import CheckpointConfig
from tests.toy_run import toy_config

CAUGHT = 3


def stops(later):
    """The step at which this rank stops, when rank 1 alone catches a signal in step ``CAUGHT``."""
    config = toy_config(checkpoint=CheckpointConfig(save="unused"), train={"train_iters": 9})
    callback = Preemption(config, later)
    run = SimpleNamespace(config=config, progress=SimpleNamespace(step=0), stop_reason=None)
    while run.stop_reason is None and run.progress.step < 9:
        run.progress.step += 1
        if run.progress.step == CAUGHT and dist.get_rank() == 1:
            callback._catch(signal.SIGTERM, None)
        callback.on_train_step_end(run)
    return run.progress.step


def both_ways():
    return stops(False), stops(True)


def test_all_ranks_stop_after_the_same_step(two_workers):
    assert two_workers.run(both_ways) == [(CAUGHT, CAUGHT + 1)] * 2
