# SPDX-License-Identifier: Apache-2.0
"""Tensors that say that they are on a GPU, on machines without one: shapes and devices, no numbers.

Only forward passes work, because autograd asks the driver for the device of a gradient.
"""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode


def fake_mode():
    """Inside of it, `fake_cuda` makes tensors."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_cuda(*shape, dtype=torch.float32):
    """A tensor without numbers on the first GPU; torch's other factories are redirected to the CPU in tests."""
    strides = torch.empty(shape, device="meta").stride()
    return torch.empty_strided(shape, strides, dtype=dtype, device="cuda")
