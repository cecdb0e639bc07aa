# SPDX-License-Identifier: Apache-2.0
"""Which optimizers are built, and what they count."""

import torch

from megatron.bridge.training.optim.optimizer import _use_fused_kernels


def test_fused_kernels_differ_by_a_rounding_at_most():
    results = []
    for fused in (False, True):
        torch.manual_seed(0)
        parameters = [torch.randn(size, requires_grad=True) for size in ((33, 65), (7,))]
        optimizer = torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1)
        if fused:
            _use_fused_kernels(optimizer)
        for _ in range(10):
            for parameter in parameters:
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
        results.append(torch.cat([parameter.detach().flatten() for parameter in parameters]))
    assert torch.allclose(results[0], results[1], rtol=2.4e-7, atol=1e-8)
