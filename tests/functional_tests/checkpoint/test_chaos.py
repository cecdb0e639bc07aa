# SPDX-License-Identifier: Apache-2.0
"""A run that is broken at every phase ends as if nothing had happened."""

import pytest

from benchmarks import chaos


def _survives(folder, faults):
    attempts = chaos.chaos(folder, faults)
    assert not [entry for entry in attempts if entry.problems], chaos.report(attempts)
    happened = [
        event
        for event in chaos.events(chaos.Paths(folder))
        if event["event"] in ("fault", "damage")
    ]
    assert len(happened) >= len(faults)
    assert all(entry.recovered is not None for entry in attempts[:-1] if entry.detected is not None)


def test_a_plan_holds_every_phase_and_kind():
    faults = chaos.plan(24, seed=0)
    assert {fault.kind for fault in faults} == {"kill", "disk", "damage", "nan", "slow"}
    assert {fault.phase for fault in faults if fault.kind == "kill"} == set(chaos.PHASES)
    assert {fault.detail for fault in faults if fault.kind == "kill"} == {
        "SIGKILL",
        "SIGTERM",
        "SIGSTOP",
    }
    assert faults == chaos.plan(24, seed=0)


def test_three_hundred_hold_every_pair():
    kills = [fault for fault in chaos.plan(300, seed=1) if fault.kind == "kill"]
    pairs = {(fault.phase, fault.detail) for fault in kills}
    assert pairs == {(phase, name) for phase in chaos.PHASES for name in chaos.SIGNALS}
    assert {(fault.detail, fault.target) for fault in kills} == {
        (name, target)
        for name in chaos.SIGNALS
        for target in ("rank 0", "rank 1", "all", "launcher")
    }


def test_seven_faults(tmp_path):
    _survives(tmp_path / "chaos", chaos.plan(21, seed=0)[::3])


@pytest.mark.slow
@pytest.mark.parametrize(("count", "seed"), [(60, 1), (1000, 2)])
def test_many_faults(tmp_path, count, seed):
    _survives(tmp_path / "chaos", chaos.plan(count, seed))
