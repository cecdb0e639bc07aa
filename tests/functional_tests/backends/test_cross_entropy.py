# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy over a vocabulary split between two ranks equals that of one process."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state

from megatron.bridge.backends.kernels import eager


def compare(dtype, reuse):
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(7, 2, 40, generator=generator) * 10).to(dtype)
    target = torch.randint(0, 40, (7, 2), generator=generator)
    exact = logits.float().clone().requires_grad_()
    expected = F.cross_entropy(exact.flatten(0, 1), target.flatten(), reduction="none").view(7, 2)
    expected.sum().backward()
    part = exact.grad.chunk(2, dim=-1)[dist.get_rank()]
    leaf = logits.chunk(2, dim=-1)[dist.get_rank()].clone().requires_grad_()
    loss = eager._CrossEntropy.apply(
        leaf * 1.0, target, parallel_state.get_tensor_model_parallel_group(), reuse
    )
    loss.sum().backward()
    return (loss - expected).abs().max().item(), (leaf.grad.float() - part).abs().max().item()


@pytest.mark.parametrize(
    ("dtype", "reuse", "tolerance"),
    [(torch.float32, False, 1e-6), (torch.float32, True, 1e-6), (torch.bfloat16, False, 2**-9)],
)
def test_split_vocabulary(two_workers, dtype, reuse, tolerance):
    for loss, grad in two_workers.run(compare, dtype, reuse):
        assert loss < 1e-5
        assert grad <= tolerance
