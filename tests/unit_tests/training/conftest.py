# SPDX-License-Identifier: Apache-2.0
"""A process group of one, taken down again."""

import pytest
import torch

from tests.workers import leave


@pytest.fixture
def one_process():
    """Whatever a run initialises in this process is gone after the test; what earlier tests left, before it."""
    leave()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    leave()
