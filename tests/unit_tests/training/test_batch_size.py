# SPDX-License-Identifier: Apache-2.0
"""The batch grows as the classic formula says, and every length in steps finds its samples."""

import pytest

from megatron.bridge.training.config import TrainingConfig
from megatron.bridge.training.config.batch_size import BatchSize, stages

RAMPS = [(2, 2, 100, 10), (1, 3, 25, 10), (16, 16, 1000, 64), (4, 4, 3, 16), (8, 56, 1, 64)]


def formula(start, increment, samples, full, consumed):
    """Increments that have begun, each of which lasts for an equal share of the samples."""
    if consumed >= samples:
        return full
    return start + int(consumed * ((full - start) // increment) / samples) * increment


@pytest.mark.parametrize(("start", "increment", "samples", "full"), RAMPS)
def test_the_batch_grows_by_equal_increments(start, increment, samples, full):
    batch = BatchSize(
        TrainingConfig(global_batch_size=full, rampup_batch_size=[start, increment, samples])
    )
    for consumed in range(samples + full):
        assert batch.at(consumed) == formula(start, increment, samples, full, consumed)


@pytest.mark.parametrize("ramp", [None, *RAMPS])
def test_steps_and_samples_are_each_others_inverse(ramp):
    *rampup, full = ramp or (8,)
    batch = BatchSize(TrainingConfig(global_batch_size=full, rampup_batch_size=rampup or None))
    consumed = 0
    for steps in range(60):
        assert batch.samples_after(steps) == consumed
        assert batch.steps_within(consumed) == steps
        assert batch.steps_within(consumed + batch.at(consumed) - 1) == steps
        consumed += batch.at(consumed)


def test_without_a_ramp_there_is_one_stage():
    assert stages(TrainingConfig(global_batch_size=8)) == [(0, 8)]
