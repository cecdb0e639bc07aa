# SPDX-License-Identifier: Apache-2.0
"""What the flash kernel is asked for equals the formula; the kernel itself is PyTorch's, and needs a GPU."""

from dataclasses import dataclass

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch.nn.attention import varlen

from megatron.bridge.backends.attention import flash_attention
from megatron.bridge.backends.attention.block_mask import (
    AttentionWindow,
    PackedSegment,
    whole_sequence,
    zigzag_spans,
)
from megatron.bridge.backends.attention.ring_attention import BatchedFlashKernel, FormulaKernel
from megatron.bridge.backends.decoding.step import DecodingStep, SingleTokens, TokenSpan
from tests.unit_tests.backends import naive
from tests.unit_tests.backends.test_torch_attention import build, inputs

pytestmark = pytest.mark.usefixtures("one_rank")


def documented_kernel(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size):
    """What PyTorch's documentation says of ``varlen_attn``, sequence by sequence; queries are the last tokens."""
    out, bounds = [], [cu_seq_q.tolist(), cu_seq_k.tolist()]
    for low, high, first, last in zip(
        bounds[0], bounds[0][1:], bounds[1], bounds[1][1:], strict=False
    ):
        assert high - low <= max_q
        assert last - first <= max_k
        seen = naive.seen_by_position(high - low, last - first, causal=False, window=window_size)
        tensors = (t[:, None] for t in (query[low:high], key[first:last], value[first:last]))
        out.append(naive.attention(*tensors, seen, scale=scale).squeeze(1))
    return torch.cat(out)


@dataclass(frozen=True)
class DocumentedKernel:
    """What `CudaKernel` does, by the formulas: shares are exp(score - logarithm), whatever the logarithm is."""

    bounds: tuple[torch.Tensor, torch.Tensor]
    longest: tuple[int, int]
    window: tuple[int, int]
    scale: float

    def scores(self, query, key):
        """[tokens, h, keys], -inf where a key is not seen."""
        key = key.repeat_interleave(query.size(1) // key.size(1), dim=1)
        found = torch.einsum("shd,thd->sht", query, key) * self.scale
        seen = torch.zeros(len(query), len(key), dtype=torch.bool)
        bounds = [one.tolist() for one in self.bounds]
        for low, high, first, last in zip(
            bounds[0], bounds[0][1:], bounds[1], bounds[1][1:], strict=False
        ):
            part = naive.seen_by_position(
                high - low, last - first, causal=False, window=self.window
            )
            seen[low:high, first:last] = part
        return found.masked_fill(~seen[:, None], -torch.inf)

    def forward(self, query, key, value):
        scores = self.scores(query, key)
        value = value.repeat_interleave(query.size(1) // value.size(1), dim=1)
        return torch.einsum("sht,thd->shd", scores.softmax(-1), value), scores.logsumexp(-1)

    def backward(self, grad, out, log_sum, query, key, value):
        repeats = query.size(1) // key.size(1)
        wide, values = (
            key.repeat_interleave(repeats, dim=1),
            value.repeat_interleave(repeats, dim=1),
        )
        shares = (self.scores(query, key) - log_sum.unsqueeze(-1)).exp()
        along = torch.einsum("shd,thd->sht", grad, values) - (grad * out).sum(-1, keepdim=True)
        inner = shares * along * self.scale
        grads = (
            torch.einsum("sht,shd->thd", inner, query),
            torch.einsum("sht,shd->thd", shares, grad),
        )
        grads = (one.unflatten(1, (-1, repeats)).sum(2) for one in grads)
        return torch.einsum("sht,thd->shd", inner, wide), *grads

    def expand_sinks(self, sinks):
        return sinks.to(torch.float64)


@pytest.fixture(params=["documented", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    """The kernel of the documentation, in fp64; or the GPU's, in bf16."""
    if request.param == "cuda":
        return "cuda"
    monkeypatch.setattr(flash_attention, "CudaFlashKernel", DocumentedKernel)
    monkeypatch.setattr(varlen, "varlen_attn", documented_kernel)
    monkeypatch.setattr(flash_attention, "is_supported", lambda query: True)
    return "cpu"


def compare(device, kernel, reference, tensors):
    """Outputs and gradients."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float64
    low = [tensor.detach().to(device, dtype).requires_grad_() for tensor in tensors]
    high = [tensor.detach().cpu().double().requires_grad_() for tensor in low]
    found, expected = kernel(*low), reference(*high)
    expected = expected.reshape(found.shape)
    weight = torch.randn(
        expected.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64
    )
    got = torch.autograd.grad((found * weight.to(found)).sum(), low)
    wanted = torch.autograd.grad((expected * weight).sum(), high)
    tolerance = 3e-2 if device == "cuda" else 1e-12
    for one, other in zip((found, *got), (expected, *wanted), strict=True):
        scale = other.abs().max().item()
        torch.testing.assert_close(one.cpu().double(), other, atol=tolerance * scale, rtol=0)


@pytest.mark.parametrize("window", [None, (5, 0), (200, 0)])
def test_packed_rows(device, window):
    bounds = torch.tensor([0, 11, 12, 40], dtype=torch.int32, device=device)
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=28,
        max_seqlen_kv=28,
    )
    module = build(window_size=window)
    segment = torch.tensor([0] * 11 + [1] + [2] * 28)
    seen = naive.seen_by_position(40, 40, window=window) & (segment[:, None] == segment[None])

    def kernel(q, k, v):
        return module(*(tensor.squeeze(1) for tensor in (q, k, v)), None, packed_seq_params=packed)

    def reference(q, k, v):
        return naive.attention(q, k, v, seen, scale=module.scale)

    compare(device, kernel, reference, inputs(batch=1, width=16, values=8))


@pytest.mark.parametrize("window", [None, (5, 0)])
def test_sinks(device, window):
    """Their gradients, too."""
    sight = AttentionWindow(window and window[0], 0)
    seen = naive.seen_by_position(40, 40, window=window)
    sinks = torch.randn(4, generator=torch.Generator().manual_seed(2))

    def kernel(q, k, v, sinks):
        return flash_attention.attend_spans(q, k, v, whole_sequence(40, 40), sight, 0.5, sinks)

    def reference(q, k, v, sinks):
        return naive.attention(q, k, v, seen, scale=0.5, sinks=sinks)

    compare(device, kernel, reference, [*inputs(), sinks])


@pytest.mark.parametrize("packed", [False, True])
def test_a_layer_with_sinks_uses_the_kernel(device, packed, monkeypatch):
    module = build(window_size=(5, 0), softmax_type="learnable").to(device)
    seen = naive.seen_by_position(40, 40, window=(5, 0))
    bounds = torch.tensor([0, 40], dtype=torch.int32, device=device)
    rows = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=40,
        max_seqlen_kv=40,
    )
    monkeypatch.delattr(f"{type(module).__module__}._TileAttention.__call__")

    def kernel(q, k, v):
        if packed:
            return module(
                *(tensor.squeeze(1) for tensor in (q, k, v)), None, packed_seq_params=rows
            )
        return module(q, k, v, None)

    def reference(q, k, v):
        sinks = module.softmax_offset.detach().cpu().double()
        return naive.attention(q, k, v, seen, scale=module.scale, sinks=sinks)

    compare(device, kernel, reference, inputs(batch=1))


@pytest.mark.parametrize("window", [(5, 0), (39, 0), (200, 0)])
def test_windows(device, window):
    module = build(window_size=window)
    seen = naive.seen_by_position(40, 40, window=window)
    compare(
        device,
        lambda q, k, v: module(q, k, v, None),
        lambda q, k, v: naive.attention(q, k, v, seen, scale=module.scale),
        inputs(),
    )


@pytest.mark.parametrize("window", [None, (5, 0)])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_context_parallel_rank_sees_all_keys_before_its_chunks(device, rank, window):
    parts = [PackedSegment(0, 40, 40)]
    rows = torch.cat([torch.arange(10) + 10 * index for index in (rank, 3 - rank)])
    seen = naive.seen_by_position(40, 40, window=window)[rows]
    sight = AttentionWindow(window and window[0], 0)

    def kernel(q, k, v):
        return flash_attention.attend_spans(
            q[rows.to(device)], k, v, zigzag_spans(parts, rank, 2), sight, 0.5
        )

    compare(
        device, kernel, lambda q, k, v: naive.attention(q[rows], k, v, seen, scale=0.5), inputs()
    )


def test_rows_of_no_run_are_zero(device):
    runs = zigzag_spans([PackedSegment(0, 17, 20), PackedSegment(20, 20, 20)], 0, 2)
    q, k, v = (
        tensor.detach().to(device, torch.bfloat16 if device == "cuda" else None)
        for tensor in inputs()
    )
    out = flash_attention.attend_spans(q[:20], k, v, runs, AttentionWindow(None, 0), 0.5)
    covered = torch.zeros(20, dtype=torch.bool)
    for run in runs:
        covered[run.row : run.row + run.rows] = True
    assert out.shape == q[:20].shape
    assert not covered.all()
    assert not out[~covered].any()
    assert out[covered].any(-1).all()


def test_a_form_that_the_kernel_has_not():
    assert flash_attention.supports_window(AttentionWindow(None, 0))
    assert flash_attention.supports_window(AttentionWindow())
    assert not flash_attention.supports_window(AttentionWindow(3, 4))
    assert not flash_attention.is_supported(torch.zeros(4, 1, 2, 64, dtype=torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.parametrize("form", [{}, {"window_size": (1023, 0)}, {"softmax_type": "learnable"}])
def test_memory_of_a_long_packed_row_grows_with_its_length_only(form):
    """65,536 tokens in 16 sequences: the scores of one head would take 9 GB in bf16."""
    module = build(heads=8, groups=2, params_dtype=torch.bfloat16, **form).cuda()
    bounds = torch.arange(0, 65537, 4096, dtype=torch.int32, device="cuda")
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=4096,
        max_seqlen_kv=4096,
    )
    shapes = [(65536, heads, 64) for heads in (8, 2, 2)]
    q, k, v = (
        torch.randn(s, device="cuda", dtype=torch.bfloat16, requires_grad=True) for s in shapes
    )
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    module(q, k, v, None, packed_seq_params=packed).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 12 * q.nbytes


@pytest.mark.gpu
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("window", [AttentionWindow(None, 0), AttentionWindow(50, 0)])
@pytest.mark.parametrize("counts", [(1, 1, 1, 1), (5, 1, 33, 64)])
def test_extents_of_a_cache(counts, window, sinks):
    torch.manual_seed(0)
    device = torch.device("cuda")
    spans, row = [], 0
    for count, length, extent in zip(counts, (700, 5, 333, 64), (1000, 0, 3000, 2000), strict=True):
        spans.append(TokenSpan(row, count, length - count, extent, len(spans)))
        row += count
    query, cache = torch.randn(row, 8, 64), torch.randn(2, 4096, 2, 64)
    offsets = torch.randn(8) if sinks else None
    expected = naive.attend_extents(
        query, *cache, DecodingStep(spans, torch.device("cpu")).extents, window, 0.125, offsets
    )
    query, cache = query.to(device).bfloat16(), cache.to(device).bfloat16()
    step = DecodingStep(spans, device)
    if set(counts) == {1}:
        numbers = torch.tensor([(span.start, span.extent) for span in spans], device=device)
        step = SingleTokens(*numbers.t(), 131_072)
    offsets = None if offsets is None else offsets.to(device)
    found = flash_attention.attend_extents(query, *cache, step.extents, window, 0.125, offsets)
    torch.testing.assert_close(found.float().cpu(), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("causal", [False, True])
def test_blocks_of_a_ring(device, causal):
    """The flash kernel of a block gives what the formula gives, from the log-sum-exp of more keys than the block's."""
    generator = torch.Generator().manual_seed(4)
    dtype = torch.bfloat16 if device == "cuda" else torch.float64
    shapes = [(2, heads, 24 if causal else keys, 16) for heads, keys in ((4, 24), (2, 40), (2, 40))]
    query, key, value, grad = (
        torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)
        for shape in (*shapes, shapes[0])
    )
    kernels = [BatchedFlashKernel(causal, 0.3), FormulaKernel(None, causal, 0.3, None)]
    (out, log_sum), (expected, expected_sum) = (
        kernel.forward(query, key, value) for kernel in kernels
    )
    tolerance = 3e-2 if device == "cuda" else 1e-12
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=0)
    torch.testing.assert_close(log_sum, expected_sum, atol=tolerance, rtol=0, check_dtype=False)
    grads = [
        kernel.backward(grad, expected, expected_sum + 0.7, query, key, value) for kernel in kernels
    ]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, atol=tolerance, rtol=0, check_dtype=False)
