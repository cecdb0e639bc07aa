# SPDX-License-Identifier: Apache-2.0
"""The scan of a Mamba-2 layer in plain PyTorch.

A head has a state h, a matrix [head width, state size]. Each token decays the state and is added to it; the
output is read from it:

    h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T        y_t = h_t C_t

Tri Dao and Albert Gu, "Transformers are SSMs: Generalized Models and Efficient Algorithms Through Structured State
Space Duality", 2024 (arXiv:2405.21060), section 6: split into chunks, this becomes matrix products within each
chunk, as in attention, and a recurrence over chunks.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def scan(
    x: Tensor,
    dt: Tensor,
    rate: Tensor,
    b: Tensor,
    c: Tensor,
    chunk: int,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute all outputs in float32, and the state after them.

    Args:
        x: Inputs [batch, sequence, heads, head width].
        dt: Step sizes [batch, sequence, heads], positive.
        rate: A of each head, negative, [heads].
        b: B, [batch, sequence, groups, state size]; a group consists of consecutive heads.
        c: C, with the shape of ``b``.
        chunk: Length of a chunk; it changes the speed and not the result.
        state: State before the inputs [batch, groups, heads of a group, head width, state size]; zero when None.

    Returns:
        y [batch, sequence, heads, head width], and the state.
    """
    length = x.shape[1]
    groups = b.shape[2]
    chunk = min(chunk, length)
    x, dt, b, c = (_split_into_chunks(part.float(), chunk) for part in (x, dt, b, c))
    # x [batch, chunk, group, head, position, width]; dt without the width
    x = (x * dt[..., None]).unflatten(3, (groups, -1)).permute(0, 1, 3, 4, 2, 5)
    b, c = (part.transpose(2, 3)[:, :, :, None] for part in (b, c))
    # the logarithm of the remaining state at each position; fp64 because long sums are subtracted
    remaining = (dt * rate).double().cumsum(2).unflatten(3, (groups, -1)).permute(0, 1, 3, 4, 2)
    y = (c @ b.mT * _decay_matrix(remaining)) @ x
    added = (x * (remaining[..., -1:] - remaining).exp().float()[..., None]).mT @ b
    before, state = _chunk_states(added, remaining[..., -1].exp().float(), state)
    y = y + (c @ before.mT) * remaining.exp().float()[..., None]
    return y.permute(0, 1, 4, 2, 3, 5).flatten(3, 4).flatten(1, 2)[:, :length], state


def _split_into_chunks(part: Tensor, chunk: int) -> Tensor:
    """Reshape [batch, sequence, ...] to [batch, chunks, chunk, ...]; padding with zero steps has no effect."""
    padding = -part.shape[1] % chunk
    return F.pad(part, (0, 0) * (part.ndim - 2) + (0, padding)).unflatten(1, (-1, chunk))


def _decay_matrix(remaining: Tensor) -> Tensor:
    """Compute the fraction of the input of position j that remains in the state at position i >= j, [..., i, j]."""
    size = remaining.shape[-1]
    later = torch.ones(size, size, dtype=torch.bool, device=remaining.device).triu(1)
    return (
        (remaining[..., :, None] - remaining[..., None, :])
        .float()
        .masked_fill(later, -torch.inf)
        .exp()
    )


def _chunk_states(added: Tensor, remaining: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute the state before each chunk and after the last, from the chunks' additions and kept fractions."""
    state = torch.zeros_like(added[:, 0]) if state is None else state
    before: list[Tensor] = []
    for new, fraction in zip(added.unbind(1), remaining.unbind(1), strict=True):
        before.append(state)
        state = state * fraction[..., None, None] + new
    return torch.stack(before, dim=1), state
