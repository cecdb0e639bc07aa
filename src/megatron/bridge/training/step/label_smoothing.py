# SPDX-License-Identifier: Apache-2.0
"""Label smoothing: a share of the probability of each target is spread over the vocabulary."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron.bridge.backends.kernels.eager import local_targets, row_blocks, upcast
from megatron.bridge.checkpoint.model_io import unwrap

CHUNK = 1 << 22  # logits that are computed with at a time


class _TargetAboveMean(torch.autograd.Function):
    """The logit of each target minus the mean of the logits of the vocabulary, which is split over ranks."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, vocab_size: int, group: dist.ProcessGroup
    ) -> Tensor:
        rows, local, is_local = local_targets(logits, target, group)
        # rows of padding at the end of the vocabulary are no targets
        real_columns = min(max(vocab_size - group.rank() * rows.shape[-1], 0), rows.shape[-1])
        difference = upcast(rows.gather(1, local.unsqueeze(-1))).squeeze(-1) * is_local
        for part in row_blocks(rows, CHUNK):
            sums = upcast(rows[part, :real_columns]).sum(dim=-1)
            difference[part] -= sums / vocab_size
        if group.size() > 1:
            dist.all_reduce(difference, group=group)
        ctx.save_for_backward(local, is_local)
        ctx.sizes = (logits.shape, logits.dtype, real_columns, vocab_size)
        return difference.view_as(target)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        local, is_local = ctx.saved_tensors
        shape, dtype, real_columns, vocab_size = ctx.sizes
        grad = grads[0].flatten().unsqueeze(-1)
        grad_logits = grad.new_zeros(len(grad), shape[-1])
        grad_logits[:, :real_columns] = -grad / vocab_size
        grad_logits.scatter_add_(1, local.unsqueeze(-1), grad * is_local.unsqueeze(-1))
        return grad_logits.view(shape).to(dtype), None, None, None


def smooth_labels(chunks: Iterable[nn.Module], factor: float) -> None:
    """Let chunks smooth the labels of their training losses, as PyTorch's ``cross_entropy`` does.

    The loss of a token is ``(1 - factor) * CE + factor * mean``, where ``mean`` is that of the cross entropies of all
    tokens of the vocabulary. Evaluations have the cross entropy of the data.
    """
    for chunk in chunks:
        bare: Any = unwrap(chunk)
        bare.compute_language_model_loss = _smoothed(bare, bare.compute_language_model_loss, factor)


def _smoothed(
    model: Any, cross_entropy: Callable[..., Tensor], factor: float
) -> Callable[..., Tensor]:
    def compute_language_model_loss(labels: Tensor, logits: Tensor) -> Tensor:
        if not model.training:
            return cross_entropy(labels, logits)
        # first, because the gradient of the cross entropy overwrites the logits
        difference: Any = _TargetAboveMean.apply(
            logits, labels.t().contiguous(), model.config.vocab_size, model.pg_collection.tp
        )
        return cross_entropy(labels, logits) + factor * difference.t()

    return compute_language_model_loss
