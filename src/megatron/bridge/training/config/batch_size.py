# SPDX-License-Identifier: Apache-2.0
"""How many samples a step takes: ``train.global_batch_size``, or with ``train.rampup_batch_size`` a way up to it.

``[start, increment, samples]`` begins with ``start`` samples a step and adds ``increment`` at equal distances, so
that the full batch is reached after ``samples`` samples. Megatron-Core 0.19 has a calculator for any thresholds
and ignores an argument of the old form without a word, so the thresholds are made here.
"""

from typing import NamedTuple

from megatron.core.num_microbatches_calculator import (
    ConstantNumMicroBatchesCalculator,
    NumMicroBatchesCalculator,
    StepBatchsizeNumMicroBatchesCalculator,
)

from megatron.bridge.training.config.blocks.train import TrainingConfig
from megatron.bridge.training.config.run_config import RunConfig


class BatchSize:
    """The batch size as a function of the samples that were consumed before."""

    def __init__(self, train: TrainingConfig) -> None:
        self.final = train.global_batch_size
        self._calculator = _calculator(train)

    def at(self, consumed: int) -> int:
        """Samples of the step that begins behind ``consumed`` samples."""
        self._calculator.update(consumed, consistency_check=False)
        return self._calculator.get_current_global_batch_size()

    def samples_after(self, steps: int) -> int:
        """Samples that the first ``steps`` steps consume."""
        consumed = 0
        while steps > 0 and (size := self.at(consumed)) != self.final:
            consumed = consumed + size
            steps = steps - 1
        return consumed + steps * self.final

    def steps_within(self, samples: int) -> int:
        """Whole steps that ``samples`` samples are enough for."""
        consumed = steps = 0
        while (size := self.at(consumed)) != self.final:
            if consumed + size > samples:
                return steps
            consumed = consumed + size
            steps = steps + 1
        return steps + max(samples - consumed, 0) // self.final


class EvaluationBatch(NamedTuple):
    """The batch of an evaluation, over all ranks."""

    micro: int
    total: int


def evaluation_batch(config: RunConfig) -> EvaluationBatch:
    """Return the sizes of an evaluation's batch, which are those of training unless they are set."""
    train = config.train
    validation = config.validation
    return EvaluationBatch(
        validation.eval_micro_batch_size or train.micro_batch_size,
        validation.eval_global_batch_size or train.global_batch_size,
    )


def samples_of(train: TrainingConfig) -> int:
    """Training samples that a whole run draws."""
    if train.skip_train:
        return 0
    return BatchSize(train).samples_after(train.train_iters)


def stages(train: TrainingConfig) -> list[tuple[int, int]]:
    """From which number of consumed samples on a step takes how many.

    Example:
        >>> stages(TrainingConfig(global_batch_size=8, rampup_batch_size=[2, 3, 25]))
        [(0, 2), (13, 5), (25, 8)]
    """
    if train.rampup_batch_size is None:
        return [(0, train.global_batch_size)]
    start, increment, samples = train.rampup_batch_size
    count = (train.global_batch_size - start) // increment
    return [(-(-stage * samples // count), start + stage * increment) for stage in range(count + 1)]


def _calculator(train: TrainingConfig) -> NumMicroBatchesCalculator:
    # in units of samples: how many microbatches of a rank that is, the layout says
    if train.rampup_batch_size is None:
        return ConstantNumMicroBatchesCalculator(train.global_batch_size, 1, 1, False, rank=1)
    schedule = " ".join(f"{threshold}:{size}" for threshold, size in stages(train))
    return StepBatchsizeNumMicroBatchesCalculator(1, 1, False, rank=1, schedule=schedule)


class ScheduleLengths(NamedTuple):
    """Parts of a schedule in samples."""

    warmup: int  # until the peak of the learning rate
    decay: int  # until its minimum, warm-up included
    wsd_decay: int  # length of the last part of a WSD schedule, which ends with ``decay``
    run: int  # until the last step
    first_step: int  # of the first step


def lengths(config: RunConfig) -> ScheduleLengths:
    """The lengths of a resolved config's schedule."""
    scheduler = config.scheduler
    batch = BatchSize(config.train)
    steps = scheduler.lr_decay_iters or 0
    decay = (
        batch.samples_after(steps)
        if scheduler.lr_decay_samples is None
        else scheduler.lr_decay_samples
    )
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
    return ScheduleLengths(
        warmup=warmup,
        decay=decay,
        wsd_decay=wsd,
        run=samples_of(config.train),
        first_step=batch.at(0),
    )
