# SPDX-License-Identifier: Apache-2.0
"""Small operations of a layer on CPUs, in fewer passes over memory.

Each is exact up to rounding, forward and backward. Nothing is compiled at run time, because that takes at least
16 s and a C++ compiler.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import tensor_parallel, utils
from megatron.core.optimizer import clip_grads
from megatron.core.optimizer import optimizer as core_optimizer
from megatron.core.parallel_state import get_tensor_model_parallel_group
from megatron.core.transformer import mlp
from megatron.core.transformer.moe import shared_experts
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.autograd.function import once_differentiable

CHUNK = 1 << 18  # elements: 1 MB in fp32, so a chunk of logits stays in the cache of a core

core_cross_entropy = tensor_parallel.vocab_parallel_cross_entropy  # before ``install`` replaces it


class _RMSNorm(torch.autograd.Function):
    """``x / sqrt(mean(x^2) + eps) * gain`` in fp32 (or fp64), rounded once at the end."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
        wide = upcast(x)
        scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_()
        scale.div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, gain, scale)
        return (wide * scale).mul_(gain).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        x, gain, scale = ctx.saved_tensors
        size = x.shape[-1]
        wide, grad = (upcast(tensor).reshape(-1, size) for tensor in (x, grads[0]))
        scale, weight = scale.reshape(-1, 1), upcast(gain)
        product = grad * wide  # most of the work is its sums over rows and columns, as matrix products
        along_gain = scale.t().mm(product).view(-1).to(gain.dtype) if ctx.needs_input_grad[1] else None
        share = product.mm(weight.unsqueeze(-1)).mul_(scale.pow(3)).div_(size)
        grad_x = torch.addcmul(grad.mul(weight).mul_(scale), wide, share, value=-1)
        return grad_x.view(x.shape).to(x.dtype), along_gain, None


def rms_norm(x: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last dimension; ``gain`` has the dtype of ``x``."""
    return _RMSNorm.apply(x, gain, eps)  # pyright: ignore[reportReturnType]


class _SwiGLU(torch.autograd.Function):
    """``silu(gate) * up`` of the two halves of the last dimension."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, dim=-1)
        grad_x = torch.empty_like(x)
        grad_gate, grad_up = grad_x.chunk(2, dim=-1)
        torch.mul(grads[0], F.silu(gate), out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grads[0] * up, gate, grad_input=grad_gate)
        return grad_x


def swiglu(x: torch.Tensor, bias: torch.Tensor | None = None, *_: bool) -> torch.Tensor:
    """Megatron-Core's ``bias_swiglu_impl``; its other options only save memory on GPUs."""
    return _SwiGLU.apply(x if bias is None else x + bias)  # pyright: ignore[reportReturnType]


class _CrossEntropy(torch.autograd.Function):
    """Cross entropy by blocks of rows. The only tensors of full size are the logits and their gradient.

    With ``reuse``, exponentials and then the gradient overwrite the logits, as in Megatron-Core: one exponential
    per logit, and no second tensor of full size.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, target: torch.Tensor, group: dist.ProcessGroup, reuse: bool
    ) -> torch.Tensor:
        rows, local, here = local_targets(logits, target, group)
        local = local.unsqueeze(-1)
        picked = upcast(rows.gather(1, local)).squeeze(-1) * here
        highest, total = (torch.empty_like(picked) for _ in range(2))
        for part in row_blocks(rows, CHUNK):
            block = rows[part] if reuse else rows[part].to(picked.dtype, copy=True)
            torch.amax(block, dim=-1, out=highest[part])
            torch.sum(block.sub_(highest[part].unsqueeze(-1)).exp_(), dim=-1, out=total[part])
        shift = reduce_statistics(highest, total, picked, group)
        log_sum = total.log() + highest
        ctx.save_for_backward(rows, local, here, shift / total if reuse else log_sum)
        ctx.reuse = reuse
        return (log_sum - picked).view_as(target)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        rows, local, here, norm = ctx.saved_tensors
        grad, norm = grads[0].flatten().unsqueeze(-1), norm.unsqueeze(-1)
        shape = (*grads[0].shape, rows.shape[-1])
        if ctx.reuse:  # autograd refuses a second backward pass after the tensors have changed
            rows.mul_(grad * norm).scatter_add_(1, local, -grad * here.unsqueeze(-1))
            return rows.view(shape), None, None, None
        grad_logits = torch.empty_like(rows)
        for part in row_blocks(rows, CHUNK):
            block = (rows[part] - norm[part]).exp_()
            block.scatter_add_(1, local[part], here[part].unsqueeze(-1).to(block.dtype).neg_())
            grad_logits[part] = block.mul_(grad[part])
        return grad_logits.view(shape), None, None, None


def local_targets(
    logits: torch.Tensor, target: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits as rows [n, v / tp], the local column of each target, and whether the target is on this rank."""
    rows, local = logits.detach().flatten(0, -2), target.flatten() - group.rank() * logits.shape[-1]
    here = (local >= 0) & (local < logits.shape[-1])
    return rows, local.clamp(0, logits.shape[-1] - 1), here


def reduce_statistics(
    highest: torch.Tensor, total: torch.Tensor, picked: torch.Tensor, group: dist.ProcessGroup
) -> torch.Tensor:
    """Reduce the statistics over the vocabulary in place; returns the factor for this rank's exponentials."""
    if group.size() == 1:
        return torch.ones_like(total)
    local = highest.clone()
    dist.all_reduce(highest, dist.ReduceOp.MAX, group)
    shift = (local - highest).exp_()
    sums = torch.stack((total * shift, picked))
    dist.all_reduce(sums, group=group)
    total.copy_(sums[0])
    picked.copy_(sums[1])
    return shift


def cross_entropy(
    vocab_parallel_logits: torch.Tensor,
    target: torch.Tensor,
    label_smoothing: float = 0.0,
    tp_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Megatron-Core's ``vocab_parallel_cross_entropy``; label smoothing uses the original."""
    if label_smoothing:
        return core_cross_entropy(vocab_parallel_logits, target, label_smoothing, tp_group)
    group = tp_group or get_tensor_model_parallel_group()
    reuse = can_overwrite(vocab_parallel_logits) and vocab_parallel_logits.dtype is torch.float32
    return _CrossEntropy.apply(vocab_parallel_logits, target, group, reuse)  # pyright: ignore[reportReturnType]


def can_overwrite(logits: torch.Tensor) -> bool:
    """Whether nothing else needs these logits: they come from the output layer, which does not save them."""
    function = "" if logits.grad_fn is None else logits.grad_fn.name()
    return function.startswith("LinearWith") and logits.is_contiguous()


def upcast(x: torch.Tensor) -> torch.Tensor:
    """``x`` in at least fp32."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def row_blocks(rows: torch.Tensor, elements: int) -> list[slice]:
    """Slices of ``rows`` with at most ``elements`` elements each, but at least one row."""
    step = max(1, elements // rows.shape[-1])
    return [slice(start, start + step) for start in range(0, len(rows), step)]


def scale(_size: int, _flag: Any, tensors: list[list[torch.Tensor]], factor: float) -> None:
    """Megatron-Core's ``local_multi_tensor_scale`` without a scaled copy of each source."""
    sources, targets = tensors
    if factor == 1.0:
        torch._foreach_copy_(targets, sources)
    elif all(source is target for source, target in zip(sources, targets, strict=True)):
        torch._foreach_mul_(targets, factor)
    else:
        utils.local_multi_tensor_scale(_size, _flag, tensors, factor)


def l2_norm(_size: int, _flag: Any, tensors: list[list[torch.Tensor]], *_: Any) -> tuple[torch.Tensor, None]:
    """Megatron-Core's ``local_multi_tensor_l2_norm`` without a synchronization for each tensor."""
    norms = [norm for part in tensors for norm in torch._foreach_norm(part)]
    return torch.linalg.vector_norm(torch.stack(norms)).float().reshape(1), None


def fuses_activation(config: TransformerConfig) -> bool:
    """Whether ``swiglu`` computes the activation of ``config``."""
    return (
        config.activation_func == F.silu
        and config.gated_linear_unit
        and config.activation_func_clamp_value is None
        and not config.glu_linear_offset
        and config.num_moe_experts is None  # experts scale by the router's weight in the fused path
    )


def install() -> None:
    """Replace Megatron-Core's SwiGLU and cross entropy; safe to call again."""
    mlp.bias_swiglu_impl = swiglu
    shared_experts.bias_swiglu_impl = swiglu
    tensor_parallel.vocab_parallel_cross_entropy = cross_entropy
    install_for_optimizer()


def install_for_optimizer() -> None:
    """Replace Megatron-Core's operations on lists of tensors, on any device; Apex's kernels stay."""
    modules: tuple[Any, ...] = (clip_grads, core_optimizer)
    for module in modules:
        if module.multi_tensor_scale_impl is utils.local_multi_tensor_scale:
            module.multi_tensor_scale_impl = scale
    if clip_grads.l2_norm_impl is utils.local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = l2_norm
