# SPDX-License-Identifier: Apache-2.0
"""Small operations of a layer on a GPU without Transformer Engine, each compiled into one or two kernels.

Every gradient is explicit: only formulas are compiled instead of autograd graphs, and the code names the tensors for
the backward pass. SwiGLU is missing because Megatron-Core compiles its own on CUDA. Kernels compute in fp32
and round once, at the end.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.parallel_state import get_tensor_model_parallel_group
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.bridge.backends.attention.block_mask import positions_in_sequences
from megatron.bridge.backends.hardware import compiler
from megatron.bridge.backends.kernels.eager import (
    can_overwrite,
    core_cross_entropy,
    install_for_optimizer,
    local_targets,
    reduce_statistics,
    row_blocks,
)

CHUNK = (
    1 << 27
)  # logits in a block: at most 0.5 GB in fp32 without compilation, and few launches with compilation

# A formula is compiled for each width, dtype and set of tensors that need gradients, first for one number of rows
# and then for any. Beyond PyTorch's limit of 8, it would run operation by operation.
RECOMPILE_LIMIT = 64

_log = logging.getLogger(__name__)
_warned: list[str] = []


def compiled[**P, T](formula: Callable[P, T]) -> Callable[P, T]:
    """Compile ``formula`` at its first call on a GPU; without Triton it runs uncompiled, with one warning."""

    @functools.cache
    def fast() -> Callable[P, T]:  # later, because the import of the compiler takes two seconds
        from torch._dynamo import config

        config.recompile_limit = max(config.recompile_limit, RECOMPILE_LIMIT)
        return torch.compile(formula, fullgraph=True)  # a graph break would be silent

    @functools.wraps(formula)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return (fast() if can_compile() else formula)(*args, **kwargs)

    return call


def can_compile() -> bool:
    """Return whether Triton can compile kernels for this machine's GPU; if not, log one warning."""
    reason = compiler.why_not_compiled()
    if reason is None:
        return True
    if not _warned:
        _warned.append(reason)
        _log.warning(
            "%s, so norms, rotary embeddings and cross entropy run operation by operation", reason
        )
    return False


@compiled
def _normalize_rows(
    x: Tensor, weight: Tensor, eps: float, gain_offset: float
) -> tuple[Tensor, Tensor]:
    """Normalized rows [n, size] and the scale of each row [n, 1]."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * (weight.float() + gain_offset)).to(weight.dtype), scale


@compiled
def _norm_gradients(
    grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor, gain_offset: float, frozen: bool
) -> tuple[Tensor, Tensor | None]:
    """Gradients of the rows and, unless ``frozen``, of the gain."""
    unit = x.float() * scale
    along = grad.float() * (weight.float() + gain_offset)
    grad_x = scale * (along - unit * (along * unit).mean(-1, keepdim=True))
    return grad_x.to(x.dtype), None if frozen else (grad.float() * unit).sum(0).to(weight.dtype)


class _CompiledRMSNorm(torch.autograd.Function):
    """RMSNorm that saves its input and one number for each row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, gain_offset: float) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        normed, scale = _normalize_rows(rows, weight, eps, gain_offset)
        ctx.save_for_backward(rows, weight, scale)
        ctx.one = gain_offset
        return normed.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        rows, weight, scale = ctx.saved_tensors
        frozen = not ctx.needs_input_grad[1]
        grad = grads[0].reshape(rows.shape)
        grad_x, grad_weight = _norm_gradients(grad, rows, weight, scale, ctx.one, frozen)
        return grad_x.view(grads[0].shape), grad_weight, None, None


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool = False) -> Tensor:
    """RMSNorm over the last dimension, in the dtype of ``weight``; ``zero_centered`` makes the gain 1 + weight."""
    return _CompiledRMSNorm.apply(x, weight, eps, float(zero_centered))  # pyright: ignore[reportReturnType]


def _rotate_half(x: Tensor, interleaved: bool) -> Tensor:
    """(a, b) -> (-b, a), for pairs of neighbors or for the two halves of the last dimension."""
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


@compiled
def _rotate_by_angles(
    x: Tensor, angles: Tensor, positions: Tensor | None, factor: float, interleaved: bool, mla: bool
) -> Tensor:
    """Rotate ``x`` [s, b, h, d] by ``angles`` [s, 1 or b, 1, r <= d]; token i takes row ``positions[i]``."""
    angles = angles if positions is None else angles[positions]
    rotated = x[..., : angles.shape[-1]]
    rest = x[..., angles.shape[-1] :]
    if mla:
        rotated = torch.cat((rotated[..., 0::2], rotated[..., 1::2]), dim=-1)
    cosine = angles.float().cos() * factor
    sine = angles.float().sin() * factor
    out = rotated.float() * cosine + _rotate_half(rotated.float(), interleaved) * sine
    return torch.cat((out.to(x.dtype), rest), dim=-1)


@compiled
def _rotate_gradient(
    grad: Tensor,
    angles: Tensor,
    positions: Tensor | None,
    factor: float,
    interleaved: bool,
    mla: bool,
) -> Tensor:
    """The transpose of `_rotate_by_angles`; the transpose of `_rotate_half` is its negative."""
    angles = angles if positions is None else angles[positions]
    rotated = grad[..., : angles.shape[-1]].float()
    rest = grad[..., angles.shape[-1] :]
    cosine = angles.float().cos() * factor
    sine = angles.float().sin() * factor
    out = rotated * cosine - _rotate_half(rotated * sine, interleaved)
    if mla:
        out = torch.stack(out.chunk(2, dim=-1), dim=-1).flatten(-2)
    return torch.cat((out.to(grad.dtype), rest), dim=-1)


class _Rotary(torch.autograd.Function):
    """Rotation, which is linear in ``x``, so only the angles are saved."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, angles: Tensor, positions: Tensor | None, *options: Any
    ) -> Tensor:
        ctx.save_for_backward(angles, positions)
        ctx.options = options
        return _rotate_by_angles(x, angles, positions, *options)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        angles, positions = ctx.saved_tensors
        return (
            _rotate_gradient(grads[0], angles, positions, *ctx.options),
            None,
            None,
            None,
            None,
            None,
        )


def rotary(
    t: Tensor,
    freqs: Tensor,
    rotary_interleaved: bool = False,
    mla_rotary_interleaved: bool = False,
    mscale: float = 1.0,
    multi_latent_attention: bool | None = None,
) -> Tensor:
    """Megatron-Core's ``_apply_rotary_pos_emb_bshd``."""
    mla = mla_rotary_interleaved if multi_latent_attention is None else multi_latent_attention
    return _apply_rotary(t, freqs, None, float(mscale), rotary_interleaved, mla)


def _apply_rotary(t: Tensor, angles: Tensor, positions: Tensor | None, *options: Any) -> Tensor:
    return _Rotary.apply(t, angles, positions, *options)  # pyright: ignore[reportReturnType]


def rotary_packed(
    t: Tensor,
    cu_seqlens: Tensor,
    freqs: Tensor,
    rotary_interleaved: bool = False,
    mla_rotary_interleaved: bool = False,
    mscale: float = 1.0,
    cp_group: Any = None,
    multi_latent_attention: bool | None = None,
) -> Tensor:
    """Megatron-Core's ``_apply_rotary_pos_emb_thd`` in one kernel for all sequences of a packed row.

    Megatron-Core's own copies the lengths to the host, which synchronizes twice in each layer, and then
    processes one sequence after the other. It is still used under context parallelism.
    """
    if cp_group is None or cp_group.size() > 1:
        return _core_rotary_packed(
            t,
            cu_seqlens,
            freqs,
            rotary_interleaved,
            mla_rotary_interleaved,
            mscale,
            cp_group,
            multi_latent_attention,
        )
    mla = mla_rotary_interleaved if multi_latent_attention is None else multi_latent_attention
    # with as many angles as tokens, the angles belong to the tokens of the row, not to positions in sequences
    positions = (
        None if freqs.size(0) == t.size(0) else positions_in_sequences(cu_seqlens, t.size(0))
    )
    return _apply_rotary(
        t.unsqueeze(1), freqs, positions, float(mscale), rotary_interleaved, mla
    ).squeeze(1)


@compiled
def _logit_statistics(rows: Tensor, local: Tensor, here: Tensor) -> tuple[Tensor, ...]:
    """Highest logit, sum of exponentials relative to it, and logit of the target (0 on other ranks), each [n]."""
    wide = rows.float()
    highest = wide.amax(-1)
    total = (wide - highest.unsqueeze(-1)).exp().sum(-1)
    return highest, total, rows.gather(1, local.unsqueeze(-1)).squeeze(-1).float() * here


@compiled
def _logit_gradients(
    rows: Tensor, local: Tensor, here: Tensor, log_sum: Tensor, grad: Tensor
) -> Tensor:
    """(softmax - target) * grad for [n, v]."""
    columns = torch.arange(rows.shape[-1], device=rows.device)
    target = (columns == local.unsqueeze(-1)) & here.unsqueeze(-1)
    difference = (rows.float() - log_sum.unsqueeze(-1)).exp() - target.float()
    return (difference * grad.unsqueeze(-1)).to(rows.dtype)


class _CompiledCrossEntropy(torch.autograd.Function):
    """Cross entropy that saves the logits and one number per token; ``reuse``: the gradient overwrites the logits."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, group: dist.ProcessGroup, reuse: bool
    ) -> Tensor:
        rows, local, here = local_targets(logits, target, group)
        parts = [
            _logit_statistics(rows[part], local[part], here[part])
            for part in row_blocks(rows, CHUNK)
        ]
        highest, total, picked = (torch.cat(column) for column in zip(*parts, strict=True))
        reduce_statistics(highest, total, picked, group)
        log_sum = total.log() + highest
        ctx.save_for_backward(rows, local, here, log_sum)
        ctx.reuse = reuse
        return (log_sum - picked).view_as(target)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        rows, local, here, log_sum = ctx.saved_tensors
        grad = grads[0].flatten()
        # autograd refuses a second backward pass after the logits have changed
        out = rows if ctx.reuse else torch.empty_like(rows)
        for part in row_blocks(rows, CHUNK):
            out[part] = _logit_gradients(
                rows[part], local[part], here[part], log_sum[part], grad[part]
            )
        return out.view(*grads[0].shape, rows.shape[-1]), None, None, None


def cross_entropy(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    tp_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Megatron-Core's ``vocab_parallel_cross_entropy`` without fp32 logits; label smoothing uses the original.

    The original needs 6 bytes for each bf16 logit of [s, b, v / tp] at its peaks: an fp32 copy in the forward
    pass, and a gradient in both dtypes in the backward pass. This one needs the logits, which the gradient
    overwrites, and one block of ``CHUNK`` elements.
    """
    if label_smoothing:
        return core_cross_entropy(vocab_parallel_logits, target, label_smoothing, tp_group)
    group = tp_group or get_tensor_model_parallel_group()
    reuse = can_overwrite(vocab_parallel_logits)
    return _CompiledCrossEntropy.apply(vocab_parallel_logits, target, group, reuse)  # pyright: ignore[reportReturnType]


_core_rotary_packed: Any = rope_utils._apply_rotary_pos_emb_thd


def install() -> None:
    """Replace Megatron-Core's rotary embeddings and cross entropy; safe to call again."""
    compiler.share_cores()
    rope_utils._apply_rotary_pos_emb_bshd = rotary
    rope_utils._apply_rotary_pos_emb_thd = rotary_packed
    tensor_parallel.vocab_parallel_cross_entropy = cross_entropy
    install_for_optimizer()
