# SPDX-License-Identifier: Apache-2.0
"""The scan of a Mamba-2 layer in plain PyTorch.

A head holds a state h, a matrix [head width, state size]. At each token it decays and takes up the token, and the
output is read from it:

    h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T        y_t = h_t C_t

Tri Dao and Albert Gu, "Transformers are SSMs: Generalized Models and Efficient Algorithms Through Structured State
Space Duality", 2024 (arXiv:2405.21060), section 6: cut into chunks, this is matrix products within each chunk, as
in attention, and the recurrence from chunk to chunk only.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def scan(x: Tensor, dt: Tensor, rate: Tensor, b: Tensor, c: Tensor, chunk: int) -> Tensor:
    """All outputs, from a state of zero on, in float32.

    Args:
        x: tokens [batch, sequence, heads, head width].
        dt: step sizes [batch, sequence, heads], positive.
        rate: A of each head, negative [heads].
        b: what the state takes up, [batch, sequence, groups, state size]; a group is of consecutive heads.
        c: what is read from it, like ``b``.
        chunk: length of a chunk; it changes the speed and not the numbers.

    Returns:
        y [batch, sequence, heads, head width].
    """
    length, groups = x.shape[1], b.shape[2]
    chunk = min(chunk, length)
    x, dt, b, c = (_chunked(part.float(), chunk) for part in (x, dt, b, c))
    # heads by group and before the positions: x [batch, chunk, group, head, position, width], dt without the width
    x = (x * dt[..., None]).unflatten(3, (groups, -1)).permute(0, 1, 3, 4, 2, 5)
    b, c = (part.transpose(2, 3)[:, :, :, None] for part in (b, c))
    # the logarithm of what is left of a state at each position; differences of long sums need the precision
    left = (dt * rate).double().cumsum(2).unflatten(3, (groups, -1)).permute(0, 1, 3, 4, 2)
    y = (c @ b.mT * _decay(left)) @ x
    taken_up = (x * (left[..., -1:] - left).exp().float()[..., None]).mT @ b
    before = _recurrence(taken_up, left[..., -1].exp().float())
    y = y + (c @ before.mT) * left.exp().float()[..., None]
    return y.permute(0, 1, 4, 2, 3, 5).flatten(3, 4).flatten(1, 2)[:, :length]


def _chunked(part: Tensor, chunk: int) -> Tensor:
    """[batch, sequence, ...] as [batch, chunks, chunk, ...]; steps of zero behind the end change nothing."""
    padding = -part.shape[1] % chunk
    return F.pad(part, (0, 0) * (part.ndim - 2) + (0, padding)).unflatten(1, (-1, chunk))


def _decay(left: Tensor) -> Tensor:
    """How much of what position j put into the state is left at position i, [..., i, j]; nothing of the future."""
    size = left.shape[-1]
    later = torch.ones(size, size, dtype=torch.bool, device=left.device).triu(1)
    return (left[..., :, None] - left[..., None, :]).float().masked_fill(later, -torch.inf).exp()


def _recurrence(taken_up: Tensor, left: Tensor) -> Tensor:
    """The state before each chunk, from what each takes up [batch, chunks, ...] and leaves of the one before."""
    state = torch.zeros_like(taken_up[:, 0])
    before: list[Tensor] = []
    for new, share in zip(taken_up.unbind(1), left.unbind(1), strict=True):
        before.append(state)
        state = state * share[..., None, None] + new
    return torch.stack(before, dim=1)
