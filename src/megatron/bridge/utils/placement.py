# SPDX-License-Identifier: Apache-2.0
"""Report the placement of ranks: their hosts, and the CPUs and NUMA nodes that they may use."""

import os
import socket
from collections.abc import Collection
from itertools import groupby
from pathlib import Path

from megatron.bridge.utils import distributed
from megatron.bridge.utils.console import print_rank_0


def announce(debug: bool) -> None:
    """Print one line if the ranks are on several hosts, or if ``debug`` is set."""
    ranks: dict[tuple[str, str], list[int]] = {}
    for rank, host_and_cpus in enumerate(
        distributed.all_gather_object((socket.gethostname(), binding()))
    ):
        ranks.setdefault(host_and_cpus, []).append(rank)
    if debug or len({host for host, _ in ranks}) > 1:
        parts: list[str] = []
        for (host, cpus), host_ranks in ranks.items():
            part = f"{_list_numbers('rank', host_ranks)} on {host}"
            parts.append(f"{part} ({cpus})" if cpus else part)
        print_rank_0(f"placement: {', '.join(parts)}")


def binding(system: Path = Path("/sys/devices/system/cpu")) -> str:
    """Return the CPUs of this process and their NUMA nodes, or an empty string if it may use all CPUs of one node."""
    cpus = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))(0)
    pairs = [
        (int(path.name[4:]), int(path.parent.name[3:]))
        for path in system.glob("cpu[0-9]*/node[0-9]*")
    ]
    several = len({node for node, _ in pairs}) > 1
    bound = _list_numbers("CPU", cpus) if several or len(cpus) != os.cpu_count() else ""
    return bound + (
        f", {_list_numbers('NUMA node', {n for n, cpu in pairs if cpu in cpus})}" * several
    )


def _list_numbers(name: str, numbers: Collection[int]) -> str:
    runs = [
        list(run)
        for _, run in groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0])
    ]
    spans = [f"{run[0][1]}-{run[-1][1]}" if len(run) > 1 else str(run[0][1]) for run in runs]
    return f"{name}{'s' * (len(numbers) > 1)} {','.join(spans)}"
