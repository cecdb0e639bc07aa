# SPDX-License-Identifier: Apache-2.0
"""A process group of one, taken down again."""

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state


@pytest.fixture
def one_process():
    """Whatever a run initialises in this process is gone after the test."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
