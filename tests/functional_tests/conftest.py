# SPDX-License-Identifier: Apache-2.0
"""A tiny model on disk, and a process that is as it was after a run in it."""

import pytest

from tests.toy_run import save_llama
from tests.workers import leave

# Files that take longest, so that they do not begin when the others are done; the first one mostly waits.
FIRST = ("slurm", "family_layouts", "parity", "chaos", "pages", "restarts", "tutorials", "resume")


def pytest_collection_modifyitems(items):
    """Give long files to the processes of xdist before short ones."""
    order = [f"test_{name}.py" for name in FIRST]
    items.sort(
        key=lambda item: order.index(item.path.name) if item.path.name in order else len(order)
    )


@pytest.fixture(scope="module", autouse=True)
def no_group_is_left():
    """Process groups do not leak from one file into the next, whichever that is."""
    yield
    leave()


@pytest.fixture
def run_in_process():
    """Whatever a run initialises in this process is gone after the test."""
    yield
    leave()


@pytest.fixture
def hf_directory(tmp_path, run_in_process):
    """A tiny Hugging Face model for a run in this process."""
    return save_llama(tmp_path / "hf")
