# SPDX-License-Identifier: Apache-2.0
"""Attention sinks on top of PyTorch's flash kernels, without a score matrix in memory.

A sink adds exp(sink) to the sum of a head's softmax. From the logarithm of that sum, l = log(sum_j exp(s_j)),
which the kernels give beside their output, the new one is l' = log(exp(l) + exp(sink)), and the output shrinks by
exp(l - l'). The kernels' backward pass needs no change: from l' it computes the shares exp(s_j - l') that are
left, and ds_j = share_j (g v_j - g out), for g the gradient of the output, holds for the shrunk output, since a
sink has no value. The sink's own gradient is -exp(sink - l') (g out).
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.autograd.function import once_differentiable

_aten = torch.ops.aten


class Kernel(Protocol):
    """A flash kernel: output [..., d] of each query and head, and the logarithm of its sum, [...]."""

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and logarithm."""
        ...

    def backward(
        self, grad: torch.Tensor, out: torch.Tensor, log_sum: torch.Tensor, *qkv: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of query, key and value."""
        ...

    def by_head(self, sinks: torch.Tensor) -> torch.Tensor:
        """[h] in a shape that broadcasts to the logarithm."""
        ...


@dataclass(frozen=True)
class CpuKernel:
    """Of [b, h, s, d]; keys and values may have fewer heads."""

    bias: torch.Tensor | None
    causal: bool
    scale: float

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[b, h, s, d] and [b, h, s]."""
        return _aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, self.causal, attn_mask=self.bias, scale=self.scale
        )

    def backward(
        self, grad: torch.Tensor, out: torch.Tensor, log_sum: torch.Tensor, *qkv: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As ``forward`` takes them."""
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, *qkv, out, log_sum, 0.0, self.causal, attn_mask=self.bias, scale=self.scale
        )

    def by_head(self, sinks: torch.Tensor) -> torch.Tensor:
        """[h, 1]."""
        return sinks.unsqueeze(-1)


@dataclass(frozen=True)
class CudaKernel:
    """Of [tokens, h, d] in sequences between ``bounds``, of at most ``longest`` tokens; (queries, keys) each."""

    bounds: tuple[torch.Tensor, torch.Tensor]
    longest: tuple[int, int]
    window: tuple[int, int]
    scale: float

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[tokens, h, d] and [tokens, h]."""
        out, log_sum, *_ = _aten._flash_attention_forward(
            query, key, value, *self.bounds, *self.longest, 0.0, self._causal(), False, **self._limits()
        )
        return out, log_sum.t()

    def backward(
        self, grad: torch.Tensor, out: torch.Tensor, log_sum: torch.Tensor, *qkv: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As ``forward`` takes them."""
        state = torch.zeros(2, dtype=torch.uint64, device=grad.device)  # of dropout, which there is not
        unused = torch.empty(0, device=grad.device)
        shared = (*self.bounds, *self.longest, 0.0, self._causal(), state, unused)
        lines = log_sum.t().contiguous()
        return _aten._flash_attention_backward(grad, *qkv, out, lines, *shared, **self._limits())

    def by_head(self, sinks: torch.Tensor) -> torch.Tensor:
        """[h]."""
        return sinks

    def _causal(self) -> bool:
        return self.window == (-1, 0)

    def _limits(self) -> dict[str, Any]:
        left, right = self.window
        return {"scale": self.scale, "window_size_left": left, "window_size_right": right}


class _WithSinks(torch.autograd.Function):
    """Keeps what the kernel itself keeps."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor, kernel: Kernel
    ) -> torch.Tensor:
        out, log_sum = kernel.forward(query, key, value)
        whole = torch.logaddexp(log_sum, kernel.by_head(sinks.to(log_sum.dtype)))
        out = (out * (log_sum - whole).exp().unsqueeze(-1)).to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks, out, whole)
        ctx.kernel = kernel
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, sinks, out, whole = ctx.saved_tensors
        kernel: Kernel = ctx.kernel
        grad = grads[0].contiguous()
        shares = (kernel.by_head(sinks.to(whole.dtype)) - whole).exp()
        lost = shares * (grad.to(whole.dtype) * out).sum(-1)
        heads = lost.sum_to_size(kernel.by_head(sinks).shape).view_as(sinks)
        return (*kernel.backward(grad, out, whole, query, key, value), -heads.to(sinks.dtype), None)


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor, kernel: Kernel
) -> torch.Tensor:
    """``kernel``'s output with a sink for each head, [h]."""
    return _WithSinks.apply(query, key, value, sinks, kernel)  # pyright: ignore[reportReturnType]
