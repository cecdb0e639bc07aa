# SPDX-License-Identifier: Apache-2.0
"""Which optimizers are built, and what they count."""

import pytest
import torch
from megatron.core.optimizer import OptimizerConfig

from megatron.bridge.training.optim.optimizer import _use_fused_kernels, build_optimizer
from megatron.bridge.utils.errors import UserError


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"optimizer": "lion"}, "optimizer.optimizer='lion' is not supported: use one of adam, sgd, muon"),
        ({"optimizer": "sgd", "use_distributed_optimizer": True}, "only adam, not 'sgd': set ddp.use_distrib"),
        ({"use_precision_aware_optimizer": True, "use_distributed_optimizer": True}, "cannot be saved"),
        ({"optimizer_cpu_offload": True}, "cannot be saved"),
    ],
)
def test_optimizers_whose_state_is_not_known_are_refused(options, words):
    config = OptimizerConfig(lr=1e-3)
    for name, value in options.items():
        setattr(config, name, value)
    with pytest.raises(UserError, match=words):
        build_optimizer(config, [])


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
