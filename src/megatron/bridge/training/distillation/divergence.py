# SPDX-License-Identifier: Apache-2.0
"""KL divergence between the next-token distributions of teacher and student, with a sharded vocabulary.

Ranks exchange a few numbers per token, never logits. All computations are in fp32 (fp64 for fp64 logits).
"""

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK_LOGITS = 1 << 22  # logits at a time: 16 MiB in fp32, so a block stays in the caches of a CPU
CUDA_BLOCK_LOGITS = (
    1 << 26
)  # 256 MiB: 8,192 tokens of a vocabulary of 128k are 16 blocks instead of 256
MINUS_INFINITY = float("-inf")


class TopTokens(NamedTuple):
    """The most likely tokens of a distribution; all other tokens count as one."""

    ids: Tensor  # token ids, [..., k]
    log_probs: Tensor  # log probabilities of these tokens, [..., k]
    log_rest: Tensor  # log probability of all other tokens together, [...]


def kl_divergence(
    student: Tensor, teacher: Tensor, temperature: float, group: dist.ProcessGroup
) -> Tensor:
    """KL(teacher || student) of each token, over the full vocabulary.

    Logits are [..., this rank's shard of the vocabulary]; those of the teacher get no gradient. The divergence in nats
    [...] is equal on all ranks of ``group``. ``temperature`` divides the logits; gradients shrink with its square, for
    which the caller compensates (https://arxiv.org/abs/1503.02531, section 2).
    """
    return _WholeKL.apply(student, teacher.detach(), temperature, group)  # pyright: ignore[reportReturnType]


def mixed_divergence(
    student: Tensor, teacher: Tensor, beta: float, temperature: float, group: dist.ProcessGroup
) -> Tensor:
    """The generalized Jensen-Shannon divergence of each token, over the full vocabulary.

    With ``m = beta p_teacher + (1 - beta) p_student`` it is ``beta KL(teacher || m) + (1 - beta) KL(student || m)`` for
    ``beta`` between 0 and 1 (Agarwal et al. 2024, https://arxiv.org/abs/2306.13649, equation 1), and the limits
    divided by ``beta`` or ``1 - beta`` at the ends: ``KL(teacher || student)`` for 0, ``KL(student || teacher)`` for 1.

    Args:
        student: Logits, [..., this rank's shard of the vocabulary].
        teacher: Logits of the same shape, which get no gradient.
        beta: Weight of the teacher in the mixture, 0 to 1.
        temperature: Divides the logits.
        group: The tensor-parallel ranks.

    Returns:
        Nats [...], equal on all ranks of ``group``.
    """
    if beta == 0.0:
        return kl_divergence(student, teacher, temperature, group)
    divergence: Any = _MixedDivergence.apply(student, teacher.detach(), beta, temperature, group)
    return divergence


def top_kl_divergence(
    student: Tensor, teacher: TopTokens, temperature: float, group: dist.ProcessGroup
) -> Tensor:
    """KL(teacher || student) of each token, where all tokens outside of the teacher's top tokens count as one.

    Merging outcomes never increases the divergence: the result is a lower bound of the full divergence, and 0 if
    both distributions agree on the top tokens. Unlike truncation, it preserves the probability mass of the other
    tokens.

    Logits are [..., this rank's shard of the vocabulary]; the divergence in nats [...] is equal on all ranks of
    ``group``.
    """
    return _TopKL.apply(student, *teacher, temperature, group)  # pyright: ignore[reportReturnType]


@torch.no_grad()
def top_tokens(
    logits: Tensor, count: int, temperature: float, group: dist.ProcessGroup
) -> TopTokens:
    """The ``count`` most likely tokens of each distribution, equal on all ranks.

    ``logits`` are this rank's shard of the vocabulary, [..., shard], sharded over ``group``; ``temperature``
    divides them.
    """
    scaled = _to_fp32(logits) / temperature
    values, places = scaled.topk(min(count, scaled.shape[-1]), dim=-1)
    ids = places + group.rank() * scaled.shape[-1]
    values, ids = (gather_from_tensor_model_parallel_region(part, group) for part in (values, ids))
    values, order = values.topk(count, dim=-1)
    ids = ids.gather(-1, order)
    rest = _log_sum_exp(_masked_out(scaled, ids, group), group)
    log_total = torch.logaddexp(values.logsumexp(-1), rest)
    return TopTokens(ids, values - log_total.unsqueeze(-1), rest - log_total)


class _WholeKL(torch.autograd.Function):
    """Computes blocks of rows. The only saved tensor of the logits' size is the gradient, in their precision."""

    @staticmethod
    def forward(
        ctx: Any, student: Tensor, teacher: Tensor, temperature: float, group: dist.ProcessGroup
    ) -> Tensor:
        teacher_rows = teacher.flatten(0, -2)
        student_rows = student.flatten(0, -2)
        blocks = _row_blocks(student_rows)
        highest = torch.stack(
            [
                torch.cat([_to_fp32(x[rows].amax(-1)) for rows in blocks])
                for x in (teacher_rows, student_rows)
            ]
        )
        highest = highest / temperature
        _reduce(highest, dist.ReduceOp.MAX, group)
        sums = torch.cat(
            [
                _sums(teacher_rows[rows], student_rows[rows], temperature, highest[:, rows])
                for rows in blocks
            ],
            1,
        )
        _reduce(sums, dist.ReduceOp.SUM, group)
        gradient = torch.empty_like(student_rows)
        for rows in blocks:
            p, q = (
                _exp(x[rows], temperature, top[rows])
                for x, top in zip((teacher_rows, student_rows), highest, strict=True)
            )
            gradient[rows] = (q / sums[1, rows].unsqueeze(-1)).sub_(p / sums[0, rows].unsqueeze(-1))
        ctx.save_for_backward(gradient)
        ctx.temperature = temperature
        # sum of p (log p - log q), where the logits were shifted by their maxima
        return (sums[2] / sums[0] - sums[0].log() + sums[1].log()).view(student.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        factor = grads[0].flatten().unsqueeze(-1) / ctx.temperature
        return (gradient * factor).to(gradient.dtype).view(*grads[0].shape, -1), None, None, None


class _MixedDivergence(torch.autograd.Function):
    """Computes blocks of rows, and the gradient in the forward pass, as ``_WholeKL``.

    Of ``beta KL(t || m) + (1 - beta) KL(s || m)`` the derivative by the student's probability ``s_i`` is
    ``(1 - beta) (log s_i - log m_i)``, up to a constant that the softmax removes; of ``KL(s || t)`` it is
    ``log s_i - log t_i``. So with ``d = log s - log m`` (or ``log t``) the gradient of a logit is
    ``factor s_i (d_i - sum_j s_j d_j)``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        student: Tensor,
        teacher: Tensor,
        beta: float,
        temperature: float,
        group: dist.ProcessGroup,
    ) -> Tensor:
        teacher_rows = teacher.flatten(0, -2)
        student_rows = student.flatten(0, -2)
        gradient = torch.empty_like(student_rows)
        divergences = []
        factor = 1.0 if beta == 1.0 else 1.0 - beta
        for rows in _row_blocks(student_rows):
            log_t = _log_softmax(teacher_rows[rows], temperature, group)
            log_s = _log_softmax(student_rows[rows], temperature, group)
            s = log_s.exp()
            log_m = _log_mixture(log_t, log_s, beta)
            difference = torch.where(s > 0, log_s - log_m, 0.0)
            costs = torch.stack(((s * difference).sum(-1), torch.zeros_like(log_t[:, 0])))
            if beta < 1.0:
                t = log_t.exp()
                costs[1] = torch.where(t > 0, t * (log_t - log_m), 0.0).sum(-1)
            _reduce(costs, dist.ReduceOp.SUM, group)
            divergences.append(factor * costs[0] + beta * costs[1])
            gradient[rows] = factor * s * (difference - costs[0].unsqueeze(-1))
        ctx.save_for_backward(gradient)
        ctx.temperature = temperature
        return torch.cat(divergences).view(student.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        factor = grads[0].flatten().unsqueeze(-1) / ctx.temperature
        scaled = (gradient * factor).to(gradient.dtype)
        return scaled.view(*grads[0].shape, -1), None, None, None, None


class _TopKL(torch.autograd.Function):
    """The gradient is ``q - p`` for top tokens; other tokens share one in proportion to their probability."""

    @staticmethod
    def forward(
        ctx: Any,
        student: Tensor,
        ids: Tensor,
        log_probs: Tensor,
        log_rest: Tensor,
        temperature: float,
        group: dist.ProcessGroup,
    ) -> Tensor:
        scaled = _to_fp32(student) / temperature
        p, log_p = _with_remainder(log_probs, log_rest)
        positions, here = _local_places(ids, scaled.shape[-1], group)
        named = torch.where(here, scaled.gather(-1, positions.clamp(max=scaled.shape[-1] - 1)), 0.0)
        _reduce(named, dist.ReduceOp.SUM, group)
        other_logits = _masked_out(scaled, ids, group)
        rest = _log_sum_exp(other_logits, group)
        log_total = torch.logaddexp(named.logsumexp(-1), rest)
        q, log_q = _with_remainder(named - log_total.unsqueeze(-1), rest - log_total)
        shared = (q - p)[..., -1:]
        gradient = other_logits.sub_(rest.unsqueeze(-1)).exp_().mul_(shared)
        padded = torch.nn.functional.pad(gradient, (0, 1)).scatter_(
            -1, positions, (q - p)[..., :-1]
        )
        ctx.save_for_backward(padded[..., :-1].to(student.dtype))
        ctx.temperature = temperature
        return torch.where(p > 0, p * (log_p - log_q), 0.0).sum(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        factor = grads[0].unsqueeze(-1) / ctx.temperature
        return (gradient * factor).to(gradient.dtype), None, None, None, None, None


def _with_remainder(log_probs: Tensor, log_rest: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities and log probabilities of the top tokens, followed by those of all other tokens together."""
    logs = torch.cat((log_probs, log_rest.unsqueeze(-1)), dim=-1)
    return logs.exp(), logs


def _exp(logits: Tensor, temperature: float, highest: Tensor) -> Tensor:
    return (_to_fp32(logits) / temperature).sub_(highest.unsqueeze(-1)).exp_()


def _sums(teacher: Tensor, student: Tensor, temperature: float, highest: Tensor) -> Tensor:
    """Sums over this rank's shard: exponentials of both, and the teacher's times the difference of the logits."""
    teacher_rows = (_to_fp32(teacher) / temperature).sub_(highest[0].unsqueeze(-1))
    student_rows = (_to_fp32(student) / temperature).sub_(highest[1].unsqueeze(-1))
    p = teacher_rows.exp()
    # tokens with p = 0 add nothing, also where both logits are minus infinity
    cost = torch.where(p > 0, p * teacher_rows.sub_(student_rows), 0.0).sum(-1)
    return torch.stack((p.sum(-1), student_rows.exp_().sum(-1), cost))


def _local_places(ids: Tensor, part: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Indices of tokens in this rank's shard, ``part`` for those of other ranks; and which tokens are local."""
    local = ids.long() - group.rank() * part
    here = (local >= 0) & (local < part)
    return torch.where(here, local, part), here


def _masked_out(scaled: Tensor, ids: Tensor, group: dist.ProcessGroup) -> Tensor:
    """A copy in which the tokens ``ids`` have probability 0."""
    place, _ = _local_places(ids, scaled.shape[-1], group)
    return torch.nn.functional.pad(scaled, (0, 1)).scatter_(-1, place, MINUS_INFINITY)[..., :-1]


def _log_mixture(log_t: Tensor, log_s: Tensor, beta: float) -> Tensor:
    if beta == 1.0:
        return log_t
    return torch.logaddexp(log_t + math.log(beta), log_s + math.log1p(-beta))


def _log_softmax(logits: Tensor, temperature: float, group: dist.ProcessGroup) -> Tensor:
    """Log probabilities of this rank's shard; minus infinity for logits that are."""
    scaled = _to_fp32(logits) / temperature
    return scaled - _log_sum_exp(scaled, group).unsqueeze(-1)


def _log_sum_exp(scaled: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Log-sum-exp over all ranks; minus infinity where all logits are."""
    highest = scaled.amax(-1)
    _reduce(highest, dist.ReduceOp.MAX, group)
    shift = highest.clamp(min=torch.finfo(highest.dtype).min)  # minus infinity minus itself is NaN
    total = (scaled - shift.unsqueeze(-1)).exp_().sum(-1)
    _reduce(total, dist.ReduceOp.SUM, group)
    return total.log() + shift


def _reduce(tensor: Tensor, operation: Any, group: dist.ProcessGroup) -> None:
    if group.size() > 1:
        dist.all_reduce(tensor, operation, group)


def _to_fp32(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _row_blocks(rows: Tensor) -> list[slice]:
    step = max(1, (CUDA_BLOCK_LOGITS if rows.is_cuda else BLOCK_LOGITS) // rows.shape[-1])
    return [slice(start, start + step) for start in range(0, len(rows), step)]
