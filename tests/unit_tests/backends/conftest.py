# SPDX-License-Identifier: Apache-2.0
"""Model parallel groups of one process, for modules that ask for them."""

import pytest
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from tests.workers import leave


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """A gloo group of one, model parallel groups, and seeds."""
    leave()  # an earlier test in this process may have left its own group
    store = tmp_path_factory.mktemp("rendezvous") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    yield
    leave()
