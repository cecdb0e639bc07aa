# SPDX-License-Identifier: Apache-2.0
"""Attention by PyTorch's variable-length flash kernel, on GPUs that support it.

It supports cases without a fused ``scaled_dot_product_attention``: sliding windows, sinks, queries in the middle of
their keys (context parallelism), and packed rows. The bounds of packed rows stay on the GPU, because
copying them to the host would synchronize in every layer. The kernel aligns the queries of a span with the last of
its keys.
"""

import torch
from torch import Tensor

from megatron.bridge.backends.attention import sink_attention
from megatron.bridge.backends.attention.block_mask import QKV, AttentionWindow, QuerySpan
from megatron.bridge.backends.attention.sink_attention import CudaFlashKernel
from megatron.bridge.backends.decoding.step import Extents

_DTYPES = (torch.bfloat16, torch.float16)


def is_supported(query: Tensor) -> bool:
    """Return whether the kernel accepts these queries [s, b, h, d]."""
    width = query.size(-1)
    if not query.is_cuda or not torch.backends.cuda.is_flash_attention_available():
        return False
    recent = torch.cuda.get_device_capability(query.device) >= (8, 0)
    return recent and query.dtype in _DTYPES and width % 8 == 0 and width <= 256


def supports_window(window: AttentionWindow) -> bool:
    """Return whether the kernel has this mask: causal, with or without a window, or no mask."""
    return window.right == 0 or window == AttentionWindow()


def attend_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    longest: int,
    window: AttentionWindow,
    scale: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention [t, 1, h, d] of a packed row with sequences between ``bounds`` (int32, on the device)."""
    q, k, v = (tensor.squeeze(1) for tensor in (query, key, value))
    return _varlen_attention(
        q, k, v, (bounds, bounds), (longest, longest), window, scale, sinks
    ).unsqueeze(1)


def attend_spans(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spans: list[QuerySpan],
    window: AttentionWindow,
    scale: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention [s, b, h, d] of spans with their visible keys; zeros for queries in no span."""
    out = []
    at = 0
    for span in spans:
        if span.row > at:
            out.append(torch.zeros_like(query[at : span.row]))
        out.append(_attend_span((query, key, value), span, window, scale, sinks))
        at = span.row + span.rows
    if at < query.size(0):
        out.append(torch.zeros_like(query[at:]))
    return out[0] if len(out) == 1 else torch.cat(out)


def _attend_span(
    qkv: QKV, span: QuerySpan, window: AttentionWindow, scale: float, sinks: Tensor | None
) -> Tensor:
    query, key, value = qkv
    low = 0 if window.left is None else max(0, span.position - window.left)
    high = span.keys if window.right is None else span.position + span.rows
    q = query[span.row : span.row + span.rows]
    k, v = (tensor[span.key_row + low : span.key_row + high] for tensor in (key, value))
    batch = q.size(1)
    lengths = q.size(0), k.size(0)
    bounds = [
        torch.arange(batch + 1, device=q.device, dtype=torch.int32) * length for length in lengths
    ]
    q, k, v = (tensor.transpose(0, 1).flatten(0, 1) for tensor in (q, k, v))
    out = _varlen_attention(q, k, v, (bounds[0], bounds[1]), lengths, window, scale, sinks)
    return out.unflatten(0, (batch, -1)).transpose(0, 1)


def attend_extents(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    extents: Extents,
    window: AttentionWindow,
    scale: float,
    sinks: Tensor | None,
) -> Tensor:
    """Compute attention [rows, h, d] of the last tokens of texts; keys and values [tokens, g, d] are their cache."""
    bounds = extents.rows, extents.keys
    kernel = CudaFlashKernel(
        bounds, extents.longest, _window_limits(window), scale, extents.lengths
    )
    if sinks is not None:
        return sink_attention.attend(query, key, value, sinks, kernel)
    return kernel.forward(query, key, value)[0]


def _window_limits(window: AttentionWindow) -> tuple[int, int]:
    left, right = (-1 if limit is None else limit for limit in (window.left, window.right))
    return left, right


def _varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    window: AttentionWindow,
    scale: float,
    sinks: Tensor | None,
) -> Tensor:
    """Compute attention of [tokens, h, d]; keys and values may have fewer heads."""
    from torch.nn.attention.varlen import varlen_attn  # 0.1 s, not needed without a GPU

    limits = _window_limits(window)
    if sinks is not None:
        kernel = CudaFlashKernel(bounds, longest, limits, scale)
        return sink_attention.attend(query, key, value, sinks, kernel)
    out = varlen_attn(query, key, value, *bounds, *longest, scale=scale, window_size=limits)
    assert isinstance(out, Tensor)
    return out
