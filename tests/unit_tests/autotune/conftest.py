# SPDX-License-Identifier: Apache-2.0
"""Process groups do not leak from one module into the next."""

import pytest
import torch.distributed as dist

from tests.workers import forget_model_parallel


@pytest.fixture(scope="module", autouse=True)
def no_model_parallel_left():
    yield
    forget_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
