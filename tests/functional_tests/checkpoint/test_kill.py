# SPDX-License-Identifier: Apache-2.0
"""A job that is killed at any moment and started again gives the undisturbed job's numbers, bit for bit."""

import random

import pytest

from megatron.bridge.checkpoint import paths
from tests.functional_tests.checkpoint.jobs import POINTS, SAVES, Kill, run_job
from tests.functional_tests.checkpoint.runs import STEPS

# The second save (step 4), and steps after the first one; pruning first happens at the third.
ONE = [
    Kill("start a step", 3),
    Kill("gradients ready", 5),
    *(Kill(point, 2) for point in list(POINTS)[:4]),
]
TWO = [Kill("write shards", 2, rank=1), Kill("publish", 2)]
EACH_OF_TWO = [
    *(
        (point, rank)
        for point in ("start a step", "gradients ready", "write shards")
        for rank in range(2)
    ),
    ("write metadata", 0),  # nobody else writes it
]
# test_chaos.py kills two processes everywhere; it does not kill one alone, nor between shards and metadata.
IN_CI = {"write metadata"}


def _each(kills):
    return [
        pytest.param(kill, marks=[pytest.mark.slow] * (kill.point not in IN_CI), id=kill.point)
        for kill in kills
    ]


def _killed_then_resumed(tmp_path, world, kill, after=None):
    root, results = tmp_path / "run", tmp_path / "results"
    assert run_job(world, root, SAVES, results, kill, after) is None, "the job survived"
    before = paths.latest_iteration(root)
    resumed = run_job(world, root, SAVES, results)
    assert paths.published_iterations(root) == [STEPS - 2, STEPS]
    assert sorted(path.name for path in root.glob("iter_*")) == ["iter_0000004", "iter_0000006"]
    return before, resumed


@pytest.mark.parametrize("kill", _each(ONE))
def test_one_process(tmp_path, undisturbed_jobs, kill):
    before, resumed = _killed_then_resumed(tmp_path, 1, kill)
    assert before == (4 if kill == Kill("gradients ready", 5) else 2)
    assert resumed == undisturbed_jobs(1)


@pytest.mark.parametrize("kill", _each(TWO))
def test_two_processes(tmp_path, undisturbed_jobs, kill):
    before, resumed = _killed_then_resumed(tmp_path, 2, kill)
    assert before == 2
    assert resumed == undisturbed_jobs(2)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_two_processes_at_any_time(tmp_path, undisturbed_jobs, seed):
    after = random.Random(seed).uniform(0.5, 6)
    root, results = tmp_path / "run", tmp_path / "results"
    finished = None
    for attempt in range(20):
        finished = run_job(2, root, SAVES, results, after=after + attempt / 2)
        if finished is not None:
            break
    assert finished == undisturbed_jobs(2)


@pytest.mark.slow
@pytest.mark.parametrize(("point", "rank"), EACH_OF_TWO)
def test_two_processes_at_each_point(tmp_path, undisturbed_jobs, point, rank):
    _, resumed = _killed_then_resumed(tmp_path, 2, Kill(point, 3, rank))
    assert resumed == undisturbed_jobs(2)
