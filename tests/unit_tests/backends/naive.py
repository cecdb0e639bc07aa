# SPDX-License-Identifier: Apache-2.0
"""Attention as its formula says, over the full score matrix: the reference for the tests of this folder."""

import torch


def attention(q, k, v, seen, *, scale, softcap=None, sinks=None):
    """[s, b, h, dv] from q [s, b, h, d], k and v [s, b, g, .]; ``seen`` broadcasts to [b, h, s, s].

    A query that sees nothing gets zeros.
    """
    some = seen.any(-1, keepdim=True)
    repeats = q.size(2) // k.size(2)
    k, v = (tensor.repeat_interleave(repeats, dim=2) for tensor in (k, v))
    scores = torch.einsum("sbhd,tbhd->bhst", q, k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen & some, -torch.inf)
    if sinks is not None:
        column = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return torch.einsum("bhst,tbhd->sbhd", weights * some, v)


def seen_by_position(queries, keys, causal=True, window=None):
    """[queries, keys] from the definition: the queries are the last tokens of the keys' sequence."""
    q = torch.arange(queries)[:, None] + keys - queries
    k = torch.arange(keys)[None]
    seen = k <= q if causal else torch.ones(queries, keys, dtype=torch.bool)
    if window is not None:
        left, right = window
        seen = seen & ((left < 0) | (k >= q - left)) & ((right < 0) | (k <= q + right))
    return seen


def attend_extents(query, key, value, extents, window, scale, sinks=None):
    """Attention [rows, h, d] of the last tokens of texts whose keys are anywhere in [tokens, g, d]."""
    row, place = (
        torch.arange(len(query), device=query.device),
        torch.arange(len(key), device=query.device),
    )
    text = torch.searchsorted(extents.rows, row, right=True) - 1
    first = extents.keys[text]
    last = first + extents.lengths[text] - (extents.rows[text + 1] - row)
    low = first if window.left is None else torch.maximum(first, last - window.left)
    seen = (place >= low[:, None]) & (place <= last[:, None])
    key, value = (
        one.repeat_interleave(query.size(1) // one.size(1), dim=1).float() for one in (key, value)
    )
    scores = (
        torch.einsum("rhd,thd->rht", query.float(), key)
        .mul(scale)
        .masked_fill(~seen[:, None], -torch.inf)
    )
    if sinks is not None:
        scores = torch.cat((scores, sinks.float().view(1, -1, 1).expand(len(query), -1, 1)), -1)
    value = value.masked_fill(
        ~seen.any(0)[:, None, None], 0.0
    )  # memory that nothing was written to
    return torch.einsum("rht,thd->rhd", scores.softmax(-1)[..., : len(key)], value).to(query.dtype)
