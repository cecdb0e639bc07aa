# SPDX-License-Identifier: Apache-2.0
"""The parts of a schedule in samples, whether the config gives steps, samples or a fraction."""

from typing import NamedTuple

from megatron.bridge.training.config.batch_size import BatchSize, samples_of
from megatron.bridge.training.config.run_config import RunConfig


class Lengths(NamedTuple):
    """Parts of a schedule in samples."""

    warmup: int  # until the peak of the learning rate
    decay: int  # until its minimum, warm-up included
    wsd_decay: int  # length of the last part of a WSD schedule, which ends with ``decay``
    run: int  # until the last step


def lengths(config: RunConfig) -> Lengths:
    """The lengths of a resolved config's schedule."""
    scheduler, batch = config.scheduler, BatchSize(config.train)
    steps = scheduler.lr_decay_iters or 0
    decay = batch.samples_after(steps) if scheduler.lr_decay_samples is None else scheduler.lr_decay_samples
    if scheduler.lr_warmup_fraction is not None:
        warmup = int(scheduler.lr_warmup_fraction * decay)
    elif scheduler.lr_warmup_samples is not None:
        warmup = scheduler.lr_warmup_samples
    else:
        warmup = batch.samples_after(scheduler.lr_warmup_iters)
    wsd = scheduler.lr_wsd_decay_samples
    if wsd is None:  # the last steps, which are as many samples as the batch has by then
        last = scheduler.lr_wsd_decay_iters or 0
        wsd = decay - batch.samples_after(steps - last) if steps else last * batch.final
    return Lengths(warmup, decay, wsd, samples_of(config.train))
