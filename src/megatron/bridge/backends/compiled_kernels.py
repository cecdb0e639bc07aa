# SPDX-License-Identifier: Apache-2.0
"""The small operations of a layer on a GPU without Transformer Engine, each compiled into one or two kernels.

Every gradient is written out, so that only formulas are compiled, not autograd graphs, and that it is plain what
is kept for the backward pass. SwiGLU is missing: Megatron-Core compiles its own where there is CUDA. Numbers are
those of the formulas; within a kernel they stay in fp32 and are rounded once, at the end.
"""

import functools
import logging
import os
import shutil
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.parallel_state import get_tensor_model_parallel_group
from torch.autograd.function import once_differentiable
from torch.utils._triton import has_triton

from megatron.bridge.backends.torch_kernels import (
    blocks,
    combine_over_ranks,
    install_for_optimizer,
    library_cross_entropy,
    may_overwrite,
    targets_of_rank,
)

CHUNK = 1 << 27  # logits of a block: at most 0.5 GB in fp32 if nothing compiles, and few launches if all does

# One formula is compiled for each width, dtype, and set of tensors that need gradients, first for one number of
# rows and then for any; beyond PyTorch's limit of 8 it would run operation by operation.
FORMS = 64

_log = logging.getLogger(__name__)
_warned: list[str] = []


def compiled[**P, T](formula: Callable[P, T]) -> Callable[P, T]:
    """``formula``, compiled when it is first called on a GPU; as it is, said once, where Triton is missing."""

    @functools.cache
    def fast() -> Callable[P, T]:  # not yet: the compiler takes two seconds to import, and many never need it
        from torch._dynamo import config

        config.recompile_limit = max(config.recompile_limit, FORMS)
        return torch.compile(formula)

    @functools.wraps(formula)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return (fast() if can_compile() else formula)(*args, **kwargs)

    return call


def can_compile() -> bool:
    """Whether Triton can make kernels for this machine's GPU; if not, the log says so once."""
    lack = what_lacks()
    if lack is None:
        return True
    if not _warned:
        _warned.append(lack)
        _log.warning("%s, so norms, rotary embeddings and cross entropy run operation by operation", lack)
    return False


@functools.cache
def what_lacks() -> str | None:
    """What keeps Triton from making kernels here; None if nothing does."""
    if not has_triton():
        return "Triton cannot be used here"
    if os.environ.get("CC") is None and not any(map(shutil.which, ("gcc", "clang"))):
        return "Triton needs a C compiler (gcc, clang, or the one in CC)"
    return None


# --------------------------------------------------------------------------------------------------------- norms


@compiled
def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float, one: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Normed rows [n, size] and the factor of each row [n, 1]."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * (weight.float() + one)).to(weight.dtype), scale


@compiled
def _norm_gradients(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, one: float, frozen: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gradients of the rows and, unless it is ``frozen``, of the gain."""
    unit = x.float() * scale
    along = grad.float() * (weight.float() + one)
    grad_x = scale * (along - unit * (along * unit).mean(-1, keepdim=True))
    return grad_x.to(x.dtype), None if frozen else (grad.float() * unit).sum(0).to(weight.dtype)


class _RMSNorm(torch.autograd.Function):
    """Keeps its input and one number for each row."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, one: float) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        normed, scale = _norm(rows, weight, eps, one)
        ctx.save_for_backward(rows, weight, scale)
        ctx.one = one
        return normed.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None, None]:
        rows, weight, scale = ctx.saved_tensors
        frozen, grad = not ctx.needs_input_grad[1], grads[0].reshape(rows.shape)
        grad_x, grad_weight = _norm_gradients(grad, rows, weight, scale, ctx.one, frozen)
        return grad_x.view(grads[0].shape), grad_weight, None, None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, zero_centered: bool = False) -> torch.Tensor:
    """RMSNorm over the last dimension, in the dtype of ``weight``; the gain is 1 + weight if ``zero_centered``."""
    return _RMSNorm.apply(x, weight, eps, float(zero_centered))  # pyright: ignore[reportReturnType]


# -------------------------------------------------------------------------------------------- rotary embeddings


def _quarter_turn(x: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """(a, b) -> (-b, a), for pairs of neighbours or for the two halves of the last dimension."""
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


@compiled
def _rotate(
    x: torch.Tensor, angles: torch.Tensor, places: torch.Tensor | None, factor: float, interleaved: bool, mla: bool
) -> torch.Tensor:
    """``x`` [s, b, h, d] turned by ``angles`` [s, 1 or b, 1, r <= d], of which token i takes row ``places[i]``."""
    angles = angles if places is None else angles[places]
    turned, rest = x[..., : angles.shape[-1]], x[..., angles.shape[-1] :]
    if mla:
        turned = torch.cat((turned[..., 0::2], turned[..., 1::2]), dim=-1)
    cosine, sine = angles.float().cos() * factor, angles.float().sin() * factor
    out = turned.float() * cosine + _quarter_turn(turned.float(), interleaved) * sine
    return torch.cat((out.to(x.dtype), rest), dim=-1)


@compiled
def _rotate_back(
    grad: torch.Tensor,
    angles: torch.Tensor,
    places: torch.Tensor | None,
    factor: float,
    interleaved: bool,
    mla: bool,
) -> torch.Tensor:
    """The transpose of `_rotate`: a quarter turn's is its negative."""
    angles = angles if places is None else angles[places]
    turned, rest = grad[..., : angles.shape[-1]].float(), grad[..., angles.shape[-1] :]
    cosine, sine = angles.float().cos() * factor, angles.float().sin() * factor
    out = turned * cosine - _quarter_turn(turned * sine, interleaved)
    if mla:
        out = torch.stack(out.chunk(2, dim=-1), dim=-1).flatten(-2)
    return torch.cat((out.to(grad.dtype), rest), dim=-1)


class _Rotary(torch.autograd.Function):
    """Linear in ``x``, so that only the angles are kept."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        angles: torch.Tensor,
        places: torch.Tensor | None,
        factor: float,
        interleaved: bool,
        mla: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(angles, places)
        ctx.how = (factor, interleaved, mla)
        return _rotate(x, angles, places, factor, interleaved, mla)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        angles, places = ctx.saved_tensors
        return _rotate_back(grads[0], angles, places, *ctx.how), None, None, None, None, None


def rotary(
    t: torch.Tensor,
    freqs: torch.Tensor,
    rotary_interleaved: bool = False,
    mla_rotary_interleaved: bool = False,
    mscale: float = 1.0,
    multi_latent_attention: bool | None = None,
) -> torch.Tensor:
    """Megatron-Core's ``_apply_rotary_pos_emb_bshd``."""
    mla = mla_rotary_interleaved if multi_latent_attention is None else multi_latent_attention
    return _turned(t, freqs, None, float(mscale), rotary_interleaved, mla)


def _turned(t: torch.Tensor, angles: torch.Tensor, places: torch.Tensor | None, *how: Any) -> torch.Tensor:
    return _Rotary.apply(t, angles, places, *how)  # pyright: ignore[reportReturnType]


def rotary_packed(
    t: torch.Tensor,
    cu_seqlens: torch.Tensor,
    freqs: torch.Tensor,
    rotary_interleaved: bool = False,
    mla_rotary_interleaved: bool = False,
    mscale: float = 1.0,
    cp_group: Any = None,
    multi_latent_attention: bool | None = None,
) -> torch.Tensor:
    """Megatron-Core's ``_apply_rotary_pos_emb_thd`` in one kernel for all sequences of a packed row.

    Theirs asks the GPU for the lengths, which stops the queue of work, twice in each layer, and then takes one
    sequence after the other. Under context parallelism theirs is used.
    """
    if cp_group is None or cp_group.size() > 1:
        return _packed_by_core(
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
    # angles for every token of the row are those of its places, whatever sequence they are in
    places = None if freqs.size(0) == t.size(0) else places_in_sequences(cu_seqlens, t.size(0))
    return _turned(t.unsqueeze(1), freqs, places, float(mscale), rotary_interleaved, mla).squeeze(1)


def places_in_sequences(cu_seqlens: torch.Tensor, tokens: int) -> torch.Tensor:
    """For each token of a packed row, its place in its sequence [tokens]; computed where ``cu_seqlens`` is."""
    index = torch.arange(tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    sequence = torch.searchsorted(cu_seqlens, index, right=True) - 1
    return index - cu_seqlens[sequence]


# ------------------------------------------------------------------------------------------------- cross entropy


@compiled
def _statistics(rows: torch.Tensor, local: torch.Tensor, here: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Highest logit, sum of exponentials below it, and the target's logit (0 on other ranks), each [n]."""
    wide = rows.float()
    highest = wide.amax(-1)
    total = (wide - highest.unsqueeze(-1)).exp().sum(-1)
    return highest, total, rows.gather(1, local.unsqueeze(-1)).squeeze(-1).float() * here


@compiled
def _logit_gradients(
    rows: torch.Tensor, local: torch.Tensor, here: torch.Tensor, log_sum: torch.Tensor, grad: torch.Tensor
) -> torch.Tensor:
    """(softmax - target) * grad for [n, v]."""
    columns = torch.arange(rows.shape[-1], device=rows.device)
    target = (columns == local.unsqueeze(-1)) & here.unsqueeze(-1)
    share = (rows.float() - log_sum.unsqueeze(-1)).exp() - target.float()
    return (share * grad.unsqueeze(-1)).to(rows.dtype)


class _CrossEntropy(torch.autograd.Function):
    """Keeps the logits and one number for each token; with ``reuse`` the gradient takes the logits' place."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, target: torch.Tensor, group: dist.ProcessGroup, reuse: bool
    ) -> torch.Tensor:
        rows, local, here = targets_of_rank(logits, target, group)
        parts = [_statistics(rows[part], local[part], here[part]) for part in blocks(rows, CHUNK)]
        highest, total, picked = (torch.cat(column) for column in zip(*parts, strict=True))
        combine_over_ranks(highest, total, picked, group)
        log_sum = total.log() + highest
        ctx.save_for_backward(rows, local, here, log_sum)
        ctx.reuse = reuse
        return (log_sum - picked).view_as(target)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        rows, local, here, log_sum = ctx.saved_tensors
        grad = grads[0].flatten()
        # autograd itself refuses a second backward pass over changed logits
        out = rows if ctx.reuse else torch.empty_like(rows)
        for part in blocks(rows, CHUNK):
            out[part] = _logit_gradients(rows[part], local[part], here[part], log_sum[part], grad[part])
        return out.view(*grads[0].shape, rows.shape[-1]), None, None, None


def cross_entropy(
    vocab_parallel_logits: torch.Tensor,
    target: torch.Tensor,
    label_smoothing: float = 0.0,
    tp_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Megatron-Core's ``vocab_parallel_cross_entropy`` without fp32 logits; with label smoothing, its own.

    Theirs holds 6 bytes for each bf16 logit of [s, b, v / tp] at its peaks: an fp32 copy beside it in the forward
    pass, a gradient of each dtype in the backward. Here it is the logits, in whose place the gradient is put, and
    a block of ``CHUNK``.
    """
    if label_smoothing:
        return library_cross_entropy(vocab_parallel_logits, target, label_smoothing, tp_group)
    group = tp_group or get_tensor_model_parallel_group()
    reuse = may_overwrite(vocab_parallel_logits)
    return _CrossEntropy.apply(vocab_parallel_logits, target, group, reuse)  # pyright: ignore[reportReturnType]


# ------------------------------------------------------------------------------------------------- installation

_packed_by_core: Any = rope_utils._apply_rotary_pos_emb_thd


def install() -> None:
    """Put rotary embeddings and cross entropy where Megatron-Core calls its own; safe to call again."""
    rope_utils._apply_rotary_pos_emb_bshd = rotary
    rope_utils._apply_rotary_pos_emb_thd = rotary_packed
    tensor_parallel.vocab_parallel_cross_entropy = cross_entropy
    install_for_optimizer()
