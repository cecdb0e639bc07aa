# SPDX-License-Identifier: Apache-2.0
"""The worker pools stay as light as they start, however many tests they have run."""

from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state


def use_a_layout():
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    ones = torch.ones(1)
    dist.all_reduce(ones, group=parallel_state.get_tensor_model_parallel_group())
    return ones.item(), len(list(Path("/proc/self/task").iterdir()))


def test_threads_of_a_test_end_with_it(two_workers):
    counts = [two_workers.run(use_a_layout) for _ in range(4)]
    assert {total for run in counts for total, _ in run} == {2.0}
    (_, first), (_, last) = counts[1][0], counts[3][0]
    assert last <= first
