# SPDX-License-Identifier: Apache-2.0
"""Markers by folder, no network, no hub, and the worker pools."""

import functools
import ipaddress
import os
import socket
import zlib
from datetime import UTC, date, datetime

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest

from tests.workers import Processes, WorkerPool

WHOLE_PROGRAMS = {"launchers", "project", "recipes", "tutorials"}
"""Folders of functional tests that start commands as users do."""


SHARE = 7
"""Of tests with the marker ``sampled``, one in this many runs."""


def pytest_addoption(parser):
    parser.addoption(
        "--all-rows",
        action="store_true",
        default=bool(os.environ.get("CI")),
        help="run all tests with the marker `sampled`, as CI does",
    )


def pytest_configure():
    # the day chooses the sample; processes of pytest-xdist inherit it, also after midnight
    os.environ.setdefault("TEST_DAY", datetime.now(UTC).date().isoformat())


def pytest_report_header(config):
    if config.getoption("all_rows"):
        return "sampled tests: all"
    day = os.environ["TEST_DAY"]
    return f"sampled tests: one in {SHARE}, chosen by TEST_DAY={day}; --all-rows runs all"


def is_in_sample(name, day):
    """Return whether a sampled test runs on a day. Each one does on one day in ``SHARE``.

    Args:
        name: the test's node id.
        day: an ISO date.
    """
    return (date.fromisoformat(day).toordinal() + zlib.crc32(name.encode())) % SHARE == 0


def leave_out_of_sample(config, items):
    """Deselect the sampled tests of other days, unless all are asked for, or single tests by their node ids."""
    is_named = any("::" in argument for argument in config.args)
    if config.getoption("all_rows") or is_named:
        return
    day = os.environ["TEST_DAY"]
    others = {
        item
        for item in items
        if item.get_closest_marker("sampled") and not is_in_sample(item.nodeid, day)
    }
    config.hook.pytest_deselected(items=list(others))
    items[:] = [item for item in items if item not in others]


def pytest_collection_modifyitems(config, items):
    """Mark tests by their folder, draw the sample, and skip those that need a GPU where there is none."""
    leave_out_of_sample(config, items)
    for item in items:
        functional = "functional_tests" in item.path.parts
        for name in ("functional", "integration") if functional else ("unit",):
            item.add_marker(name)
        if item.get_closest_marker("gpu") or (
            functional and WHOLE_PROGRAMS.intersection(item.path.parts)
        ):
            item.add_marker("system")
        if item.get_closest_marker("gpu"):
            import torch

            item.add_marker(
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
            )


@pytest.fixture(autouse=True)
def no_other_hosts(request, monkeypatch):
    """Refuse connections that leave this machine."""
    if request.node.get_closest_marker("network"):
        return
    connect = socket.socket.connect

    def guarded(self, address):
        if self.family in (socket.AF_INET, socket.AF_INET6) and not _is_loopback(address[0]):
            raise OSError(f"tests may not connect to {address[0]}")
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", guarded)


def _is_loopback(host):
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@pytest.fixture(scope="session")
def family_case(tmp_path_factory):
    """Name of a row of ``tests/families`` -> its checkpoint and reference, made once."""
    from tests.families import harness
    from tests.families.rows import ROWS

    @functools.cache
    def case(name):
        return harness.make_reference(ROWS[name], tmp_path_factory.mktemp(name))

    return case


@pytest.fixture(scope="session")
def vision_case(tmp_path_factory):
    """Name of a row of ``tests/families/vision`` -> its checkpoint and reference, made once."""
    from tests.families.vision import harness
    from tests.families.vision.rows import ROWS

    @functools.cache
    def case(name):
        return harness.make_reference(ROWS[name], tmp_path_factory.mktemp(name))

    return case


@pytest.fixture(scope="session")
def processes():
    """The processes behind the pools of this session."""
    started = Processes()
    yield started
    started.close()


@pytest.fixture(scope="session")
def two_workers(processes):
    """Two gloo processes."""
    return WorkerPool(2, processes)


@pytest.fixture(scope="session")
def four_workers(processes):
    """Four gloo processes, of which two are those of ``two_workers``."""
    return WorkerPool(4, processes)


@pytest.fixture
def resolutions(monkeypatch):
    """The configs that are resolved while a test runs."""
    from megatron.bridge.training.config import container

    found = []
    inner = container.resolve

    def counted(config, *arguments):
        found.append(config)
        return inner(config, *arguments)

    monkeypatch.setattr(container, "resolve", counted)
    return found
