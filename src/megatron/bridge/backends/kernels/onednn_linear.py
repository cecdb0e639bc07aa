# SPDX-License-Identifier: Apache-2.0
"""Linear layers in float32 that multiply with oneDNN, for training on AMD processors.

PyTorch multiplies float32 matrices with MKL. On an AMD EPYC with AVX-512, oneDNN computes outputs and gradients of
inputs 6 to 20 % faster, from 128 rows and 256 features on, and gradients of weights up to 30 % slower.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_ROWS, _FEATURES = 128, 256


def is_faster() -> bool:
    """Return whether oneDNN is the faster library on this processor."""
    amd = str(torch.cpu.get_capabilities().get("cpu_name", "")).startswith("AMD")
    return (
        amd
        and torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
    )


def gains(x: Tensor, weight: Tensor) -> bool:
    """Return whether the product of x [..., in] and weight [out, in] is large enough, in float32 on the CPU."""
    plain = x.device.type == "cpu" and x.dtype == weight.dtype == torch.float32
    return plain and min(weight.shape) >= _FEATURES and x.numel() >= _ROWS * x.size(-1)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class OneDnnLinear(torch.autograd.Function):
    """``x @ weight.T + bias``; the gradient of ``x`` is summed over ``group``, if there is one."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: dist.ProcessGroup | None
    ) -> Tensor:
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        ctx.group = group
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_output = gradients[0]
        of_weight = None
        of_bias = None
        pending = None
        of_x = product(of_output, weight.t())
        if ctx.group is not None:
            pending = dist.all_reduce(of_x, group=ctx.group, async_op=True)
        rows = of_output.flatten(0, -2)
        if ctx.needs_input_grad[1]:
            of_weight = rows.t() @ x.flatten(0, -2)
        if ctx.needs_input_grad[2]:
            of_bias = rows.sum(0)
        if pending is not None:
            pending.wait()
        return of_x, of_weight, of_bias, None


_PLAIN = {
    "gradient_accumulation_fusion": False,
    "sequence_parallel": False,
    "grad_output_buffer": None,
    "gtp_remat_size": 1,
}
"""Settings with which a layer is one product, with at most one sum of its gradient over ranks."""


def replacing(linear: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Replace Megatron-Core's function of a parallel linear layer by oneDNN where oneDNN is faster and equivalent."""

    @functools.wraps(linear)
    def forward(
        input: Tensor, weight: Tensor, bias: Tensor | None, *args: Any, **settings: Any
    ) -> Tensor:
        plain = not args and all(
            settings.get(name, value) == value for name, value in _PLAIN.items()
        )
        if not plain or not gains(input, weight):
            return linear(input, weight, bias, *args, **settings)
        group = settings["tp_group"] if settings.get("allreduce_dgrad") else None
        return OneDnnLinear.apply(input, weight, bias, group)  # type: ignore[return-value]

    return forward
