# SPDX-License-Identifier: Apache-2.0
"""Attention sinks on top of PyTorch's flash kernels, without a score matrix in memory.

A sink adds exp(sink) to the denominator of a head's softmax. The kernels return l = log(sum_j exp(s_j)) with
their output. With the sink it becomes l' = log(exp(l) + exp(sink)), and the output is scaled by exp(l - l'). The
backward pass of the kernels needs no change: from l' it computes the probabilities p_j = exp(s_j - l'), and for g
the gradient of the output, ds_j = p_j (g v_j - g out) holds for the scaled output because a sink has no value. The
gradient of the sink is -exp(sink - l') (g out).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_aten = torch.ops.aten


@dataclass(frozen=True)
class CpuFlashKernel:
    """Takes [b, h, s, d]; keys and values may have fewer heads.

    ``forward`` gives the output [..., d] for each query and head, and its log-sum-exp [...].
    """

    bias: Tensor | None
    causal: bool
    scale: float

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return _aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, self.causal, attn_mask=self.bias, scale=self.scale
        )

    def backward(
        self, grad: Tensor, out: Tensor, log_sum: Tensor, *qkv: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value."""
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, *qkv, out, log_sum, 0.0, self.causal, attn_mask=self.bias, scale=self.scale
        )

    def expand_sinks(self, sinks: Tensor) -> Tensor:
        """[h] in a shape that broadcasts to the log-sum-exp."""
        return sinks.unsqueeze(-1)


@dataclass(frozen=True)
class CudaFlashKernel:
    """Takes [tokens, h, d]: sequences between ``bounds``, of at most ``longest`` tokens; (queries, keys) each.

    With ``lengths``, each sequence has that many keys from its bound on, independent of the next bound.
    """

    bounds: tuple[Tensor, Tensor]
    longest: tuple[int, int]
    window: tuple[int, int]
    scale: float
    lengths: Tensor | None = None

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        shared = (*self.bounds, *self.longest, 0.0, self._causal(), False)
        out, log_sum, *_ = _aten._flash_attention_forward(
            query, key, value, *shared, **self._limits(), seqused_k=self.lengths
        )
        return out, log_sum.t()

    def backward(
        self, grad: Tensor, out: Tensor, log_sum: Tensor, *qkv: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        state = torch.zeros(
            2, dtype=torch.uint64, device=grad.device
        )  # of dropout, which is not used
        unused = torch.empty(0, device=grad.device)
        shared = (*self.bounds, *self.longest, 0.0, self._causal(), state, unused)
        by_head = log_sum.t().contiguous()
        return _aten._flash_attention_backward(grad, *qkv, out, by_head, *shared, **self._limits())

    def expand_sinks(self, sinks: Tensor) -> Tensor:
        return sinks

    def _causal(self) -> bool:
        return self.window == (-1, 0)

    def _limits(self) -> dict[str, Any]:
        left, right = self.window
        return {"scale": self.scale, "window_size_left": left, "window_size_right": right}


FlashKernel = CpuFlashKernel | CudaFlashKernel


class _SinkAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, kernel: FlashKernel
    ) -> Tensor:
        out, log_sum = kernel.forward(query, key, value)
        total_log_sum = torch.logaddexp(log_sum, kernel.expand_sinks(sinks.to(log_sum.dtype)))
        out = (out * (log_sum - total_log_sum).exp().unsqueeze(-1)).to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks, out, total_log_sum)
        ctx.kernel = kernel
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, out, total_log_sum = ctx.saved_tensors
        kernel: FlashKernel = ctx.kernel
        grad = grads[0].contiguous()
        shares = (kernel.expand_sinks(sinks.to(total_log_sum.dtype)) - total_log_sum).exp()
        lost = shares * (grad.to(total_log_sum.dtype) * out).sum(-1)
        heads = lost.sum_to_size(kernel.expand_sinks(sinks).shape).view_as(sinks)
        return (
            *kernel.backward(grad, out, total_log_sum, query, key, value),
            -heads.to(sinks.dtype),
            None,
        )


def attend(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, kernel: FlashKernel) -> Tensor:
    """Return the output of ``kernel`` with one sink for each head, [h]."""
    return _SinkAttention.apply(query, key, value, sinks, kernel)  # pyright: ignore[reportReturnType]
