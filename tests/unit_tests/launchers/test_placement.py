# SPDX-License-Identifier: Apache-2.0
"""Where ranks run, in one line."""

import os

import pytest

from megatron.bridge.utils import distributed, placement


@pytest.mark.parametrize(
    ("nodes", "mine", "said"),
    [
        ("0000", {0, 1, 2, 3}, ""),
        ("0000", {1, 3}, "CPUs 1,3"),
        ("0101", {0, 2}, "CPUs 0,2, NUMA node 0"),
        ("0011", {0, 1, 2, 3}, "CPUs 0-3, NUMA nodes 0-1"),
        ("", {0, 1, 2, 3}, ""),
    ],
)
def test_binding(monkeypatch, tmp_path, nodes, mine, said):
    """``nodes`` has the NUMA node of each of four CPUs; some systems name none."""
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: mine)
    for cpu, node in enumerate(nodes):
        (tmp_path / f"cpu{cpu}/node{node}").mkdir(parents=True)
    assert placement.binding(tmp_path) == said


TWO_HOSTS = [("a", "CPUs 0-3"), ("a", "CPU 4"), ("b", ""), ("b", "")]


@pytest.mark.parametrize(
    ("places", "debug", "said"),
    [
        (
            TWO_HOSTS,
            False,
            "placement: rank 0 on a (CPUs 0-3), rank 1 on a (CPU 4), ranks 2-3 on b\n",
        ),
        ([("a", ""), ("b", "")] * 2, False, "placement: ranks 0,2 on a, ranks 1,3 on b\n"),
        (TWO_HOSTS[2:], False, ""),
        (TWO_HOSTS[2:], True, "placement: ranks 0-1 on b\n"),
    ],
)
def test_one_host_is_announced_to_debuggers_only(monkeypatch, capsys, places, debug, said):
    monkeypatch.setattr(distributed, "all_gather_object", lambda _: places)
    placement.announce(debug)
    assert capsys.readouterr().err == said
