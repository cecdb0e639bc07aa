# SPDX-License-Identifier: Apache-2.0
"""Attention by PyTorch's flash kernel for sequences of any lengths, where there is a GPU that runs it.

It takes what ``scaled_dot_product_attention`` has no fused form for: sliding windows, sinks, a chunk of queries in
the middle of its keys (context parallelism), and packed rows, whose bounds stay on the GPU: asking for them would
stop its queue of work in every layer. Queries of a run are the last tokens of its keys, as the kernel has it.
"""

import torch

from megatron.bridge.backends import sink_attention
from megatron.bridge.backends.attention_tiles import Run, Sight
from megatron.bridge.backends.sink_attention import CudaKernel

_DTYPES = (torch.bfloat16, torch.float16)


def runs_here(query: torch.Tensor) -> bool:
    """Whether the kernel takes these queries [s, b, h, d]."""
    width = query.size(-1)
    return query.is_cuda and query.dtype in _DTYPES and width % 8 == 0 and width <= 256 and _recent(query.device)


def _recent(device: torch.device) -> bool:
    return torch.backends.cuda.is_flash_attention_available() and torch.cuda.get_device_capability(device) >= (
        8,
        0,
    )


def has_form(sight: Sight) -> bool:
    """Whether the kernel has this mask: causal, with or without a window, or none at all."""
    return sight.right == 0 or sight == Sight()


def attend_packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: torch.Tensor,
    longest: int,
    sight: Sight,
    scale: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """[t, 1, h, d] from a packed row of sequences between ``bounds`` (int32, on the device; all t rows)."""
    q, k, v = (tensor.squeeze(1) for tensor in (query, key, value))
    return _kernel(q, k, v, (bounds, bounds), (longest, longest), sight, scale, sinks).unsqueeze(1)


def attend_runs(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    runs: list[Run],
    sight: Sight,
    scale: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """[s, b, h, d] from ``runs`` of queries, each with the keys that it can see; zeros for queries of none."""
    out, at = [], 0
    for run in runs:
        if run.row > at:
            out.append(torch.zeros_like(query[at : run.row]))
        out.append(_attend_run(query, key, value, run, sight, scale, sinks))
        at = run.row + run.rows
    if at < query.size(0):
        out.append(torch.zeros_like(query[at:]))
    return out[0] if len(out) == 1 else torch.cat(out)


def _attend_run(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    run: Run,
    sight: Sight,
    scale: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    low = 0 if sight.left is None else max(0, run.position - sight.left)
    high = run.keys if sight.right is None else run.position + run.rows
    q = query[run.row : run.row + run.rows]
    k, v = (tensor[run.key_row + low : run.key_row + high] for tensor in (key, value))
    batch = q.size(1)
    lengths = q.size(0), k.size(0)
    bounds = [torch.arange(batch + 1, device=q.device, dtype=torch.int32) * length for length in lengths]
    q, k, v = (tensor.transpose(0, 1).flatten(0, 1) for tensor in (q, k, v))
    out = _kernel(q, k, v, (bounds[0], bounds[1]), lengths, sight, scale, sinks)
    return out.unflatten(0, (batch, -1)).transpose(0, 1)


def _kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: tuple[torch.Tensor, torch.Tensor],
    longest: tuple[int, int],
    sight: Sight,
    scale: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """[tokens, h, d]; keys and values may have fewer heads."""
    from torch.nn.attention.varlen import varlen_attn  # 0.1 s that a machine without a GPU need not spend

    left, right = (-1 if limit is None else limit for limit in (sight.left, sight.right))
    if sinks is not None:
        kernel = CudaKernel(bounds, longest, (left, right), scale)
        return sink_attention.attend(query, key, value, sinks, kernel)
    out = varlen_attn(query, key, value, *bounds, *longest, scale=scale, window_size=(left, right))
    assert isinstance(out, torch.Tensor)
    return out
