# SPDX-License-Identifier: Apache-2.0
"""How far a student's next-token distribution is from the teacher's, with the vocabulary split over ranks.

Ranks exchange a few numbers per token, never logits. Everything is computed in fp32 (fp64 for fp64 logits).
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK = 1 << 22  # logits at a time: 16 MiB in fp32
NOTHING = float("-inf")


class TopTokens(NamedTuple):
    """A distribution of which only the likeliest tokens are known one by one; all others count as one.

    Attributes:
        ids: Tokens, [..., k].
        log_probs: Their log probabilities, [..., k].
        log_rest: The log probability of all other tokens together, [...].
    """

    ids: Tensor
    log_probs: Tensor
    log_rest: Tensor


def kl_divergence(student: Tensor, teacher: Tensor, temperature: float, group: dist.ProcessGroup) -> Tensor:
    """KL(teacher || student) of each token, over the whole vocabulary.

    Args:
        student: Logits of this rank's part of the vocabulary, [..., part].
        teacher: The same of the teacher; it gets no gradient.
        temperature: Divides the logits of both. Gradients shrink with its square, which the caller makes up for
            (https://arxiv.org/abs/1503.02531, section 2).
        group: The ranks that the vocabulary is split over.

    Returns:
        Nats, [...], the same on all ranks.
    """
    return _WholeKL.apply(student, teacher.detach(), temperature, group)  # pyright: ignore[reportReturnType]


def top_kl_divergence(student: Tensor, teacher: TopTokens, temperature: float, group: dist.ProcessGroup) -> Tensor:
    """KL(teacher || student) of each token, where all tokens that the teacher does not name count as one.

    Lumping outcomes together never adds divergence: this is a lower bound of the whole one, 0 if the two agree on
    the named tokens, and it keeps the probability mass of the others in its place, as cutting it off would not.

    Args:
        student: Logits of this rank's part of the vocabulary, [..., part].
        teacher: At the same temperature.
        temperature: Divides the student's logits.
        group: The ranks that the vocabulary is split over.

    Returns:
        Nats, [...], the same on all ranks.
    """
    return _TopKL.apply(student, *teacher, temperature, group)  # pyright: ignore[reportReturnType]


@torch.no_grad()
def top_tokens(logits: Tensor, count: int, temperature: float, group: dist.ProcessGroup) -> TopTokens:
    """The ``count`` likeliest tokens of each distribution, the same on all ranks.

    Args:
        logits: Those of this rank's part of the vocabulary, [..., part].
        count: Less than the vocabulary.
        temperature: Divides the logits.
        group: The ranks that the vocabulary is split over.
    """
    scaled = _wide(logits) / temperature
    values, places = scaled.topk(min(count, scaled.shape[-1]), dim=-1)
    values, ids = _gathered(values, group), _gathered(places + group.rank() * scaled.shape[-1], group)
    values, order = values.topk(count, dim=-1)
    ids = ids.gather(-1, order)
    rest = _log_sum(_without(scaled, ids, group), group)
    whole = torch.logaddexp(values.logsumexp(-1), rest)
    return TopTokens(ids, values - whole.unsqueeze(-1), rest - whole)


class _WholeKL(torch.autograd.Function):
    """By blocks of rows; of the logits' size only the gradient is kept, in the student's precision."""

    @staticmethod
    def forward(
        ctx: Any, student: Tensor, teacher: Tensor, temperature: float, group: dist.ProcessGroup
    ) -> Tensor:
        theirs, ours = teacher.flatten(0, -2), student.flatten(0, -2)
        blocks = _blocks(ours)
        highest = torch.stack([torch.cat([_highest(x[rows]) for rows in blocks]) for x in (theirs, ours)])
        highest = highest / temperature
        _reduce(highest, dist.ReduceOp.MAX, group)
        sums = torch.cat([_sums(theirs[rows], ours[rows], temperature, highest[:, rows]) for rows in blocks], 1)
        _reduce(sums, dist.ReduceOp.SUM, group)
        gradient = torch.empty_like(ours)
        for rows in blocks:
            p, q = (_exp(x[rows], temperature, top[rows]) for x, top in zip((theirs, ours), highest, strict=True))
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


class _TopKL(torch.autograd.Function):
    """The gradient is ``q - p`` for named tokens; the others share that of their sum as their probabilities."""

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
        scaled = _wide(student) / temperature
        p, log_p = _with_rest(log_probs, log_rest)
        place, here = _local(ids, scaled.shape[-1], group)
        named = torch.where(here, scaled.gather(-1, place.clamp(max=scaled.shape[-1] - 1)), 0.0)
        _reduce(named, dist.ReduceOp.SUM, group)
        others = _without(scaled, ids, group)
        rest = _log_sum(others, group)
        whole = torch.logaddexp(named.logsumexp(-1), rest)
        q, log_q = _with_rest(named - whole.unsqueeze(-1), rest - whole)
        shared = (q - p)[..., -1:]
        gradient = others.sub_(rest.unsqueeze(-1)).exp_().mul_(shared)
        padded = torch.nn.functional.pad(gradient, (0, 1)).scatter_(-1, place, (q - p)[..., :-1])
        ctx.save_for_backward(padded[..., :-1].to(student.dtype))
        ctx.temperature = temperature
        return torch.where(p > 0, p * (log_p - log_q), 0.0).sum(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        factor = grads[0].unsqueeze(-1) / ctx.temperature
        return (gradient * factor).to(gradient.dtype), None, None, None, None, None


def _with_rest(log_probs: Tensor, log_rest: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities and their logarithms, those of the other tokens behind the named ones."""
    logs = torch.cat((log_probs, log_rest.unsqueeze(-1)), dim=-1)
    return logs.exp(), logs


def _highest(logits: Tensor) -> Tensor:
    return _wide(logits.amax(-1))


def _exp(logits: Tensor, temperature: float, highest: Tensor) -> Tensor:
    return (_wide(logits) / temperature).sub_(highest.unsqueeze(-1)).exp_()


def _sums(teacher: Tensor, student: Tensor, temperature: float, highest: Tensor) -> Tensor:
    """Of this rank's part: sums of exponentials of both, and of the teacher's times the difference of logits."""
    theirs = (_wide(teacher) / temperature).sub_(highest[0].unsqueeze(-1))
    ours = (_wide(student) / temperature).sub_(highest[1].unsqueeze(-1))
    p = theirs.exp()
    # what is impossible for the teacher costs nothing, also where both logits are so low that they are infinite
    cost = torch.where(p > 0, p * theirs.sub_(ours), 0.0).sum(-1)
    return torch.stack((p.sum(-1), ours.exp_().sum(-1), cost))


def _local(ids: Tensor, part: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Places of tokens in this rank's part, ``part`` for those of other ranks; and which are here."""
    local = ids.long() - group.rank() * part
    here = (local >= 0) & (local < part)
    return torch.where(here, local, part), here


def _without(scaled: Tensor, ids: Tensor, group: dist.ProcessGroup) -> Tensor:
    """A copy in which the tokens ``ids`` are impossible."""
    place, _ = _local(ids, scaled.shape[-1], group)
    return torch.nn.functional.pad(scaled, (0, 1)).scatter_(-1, place, NOTHING)[..., :-1]


def _log_sum(scaled: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The logarithm of the sum of exponentials over all ranks; minus infinity where there is nothing."""
    highest = scaled.amax(-1)
    _reduce(highest, dist.ReduceOp.MAX, group)
    shift = highest.clamp(min=torch.finfo(highest.dtype).min)  # minus infinity minus itself is not a number
    total = (scaled - shift.unsqueeze(-1)).exp_().sum(-1)
    _reduce(total, dist.ReduceOp.SUM, group)
    return total.log() + shift


def _gathered(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    if group.size() == 1:
        return part
    parts = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(parts, part.contiguous(), group=group)
    return torch.cat(parts, dim=-1)


def _reduce(tensor: Tensor, operation: Any, group: dist.ProcessGroup) -> None:
    if group.size() > 1:
        dist.all_reduce(tensor, operation, group)


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _blocks(rows: Tensor) -> list[slice]:
    step = max(1, BLOCK // rows.shape[-1])
    return [slice(start, start + step) for start in range(0, len(rows), step)]
