# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule equals its definition token by token, forward and backward, in packed rows too."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megatron.bridge.backends.recurrent import gated_delta_net

BOUNDS = torch.tensor(
    [0, 1, 1, 70, 198, 200], dtype=torch.int32
)  # an empty sequence; a chunk's worth twice
LENGTH = 200  # more than three chunks


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def inputs(batch, dtype=torch.float64):
    """q, k, v, g and beta as a layer gives them."""
    q, k = (F.normalize(random(batch, LENGTH, 3, 8, seed=seed), dim=-1) for seed in (1, 2))
    g, beta = -random(batch, LENGTH, 3, seed=4).exp(), random(batch, LENGTH, 3, seed=5).sigmoid()
    return [
        x.to(dtype).requires_grad_() for x in (q, k, random(batch, LENGTH, 3, 5, seed=3), g, beta)
    ]


def recurrence(q, k, v, g, beta):
    """The definition: one token after the other."""
    state, found = torch.zeros(*q.shape[:1], *q.shape[2:], v.shape[-1], dtype=q.dtype), []
    for t in range(q.shape[1]):
        state = state * g[:, t, :, None, None].exp()
        recalled = torch.einsum("bhk,bhkd->bhd", k[:, t], state)
        state = state + torch.einsum(
            "bhk,bhd->bhkd", k[:, t], beta[:, t, :, None] * (v[:, t] - recalled)
        )
        found.append(torch.einsum("bhk,bhkd->bhd", q[:, t], state) / q.shape[-1] ** 0.5)
    return torch.stack(found, 1)


def by_sequence(function, bounds, *tensors):
    """``function`` of each sequence of a packed row by itself."""
    parts = zip(*(x.split(bounds.diff().tolist(), 1) for x in tensors), strict=True)
    return torch.cat([function(*part) for part in parts if part[0].shape[1]], 1)


def assert_same(found, expected, given, tolerance):
    weight = random(*expected.shape, seed=9).to(expected.dtype)
    pairs = zip(
        [found, *torch.autograd.grad((found * weight).sum(), given, retain_graph=True)],
        [expected, *torch.autograd.grad((expected * weight).sum(), given)],
        strict=True,
    )
    for one, other in pairs:
        assert (one - other).abs().max() <= tolerance * other.abs().max()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_chunks_equal_the_recurrence(dtype, tolerance):
    given = inputs(2, dtype)
    assert_same(
        gated_delta_net.chunk_gated_delta_rule(*given)[0], recurrence(*given), given, tolerance
    )


def test_sequences_of_a_packed_row_do_not_see_each_other():
    given = inputs(1)
    found = gated_delta_net.chunk_gated_delta_rule(*given, cu_seqlens=BOUNDS)[0]
    assert_same(found, by_sequence(recurrence, BOUNDS, *given), given, 1e-12)


def test_decays_that_leave_nothing_have_finite_gradients():
    """The sums of 64 such logarithms are far below what an exponential holds, and their differences far above."""
    given = inputs(1, torch.float32)
    given[3] = torch.full_like(given[3], -40.0).requires_grad_()
    found = gated_delta_net.chunk_gated_delta_rule(*given)[0]
    assert_same(found, recurrence(*given), given[:3], 1e-5)
    assert all(x.isfinite().all() for x in torch.autograd.grad(found.sum(), given))


def convolution(taps):
    """PyTorch's own convolution, of the tokens up to each."""
    layer = nn.Conv1d(6, 6, taps, groups=6, padding=taps - 1, dtype=torch.float64)
    return layer, lambda x: F.silu(layer(x.mT)[..., : x.shape[1]].mT)


@pytest.mark.parametrize("taps", [1, 4])
@pytest.mark.parametrize("packed", [False, True])
def test_convolution_equals_that_of_pytorch(taps, packed):
    layer, reference = convolution(taps)
    x = random(1, LENGTH, 6).requires_grad_()
    bounds = BOUNDS if packed else None
    found, _ = gated_delta_net.causal_conv1d(
        x, layer.weight.squeeze(1), layer.bias, "silu", cu_seqlens=bounds
    )
    expected = by_sequence(reference, BOUNDS, x) if packed else reference(x)
    assert_same(found, expected, [x, layer.weight, layer.bias], 1e-12)


def test_norm_of_queries_and_keys():
    x = random(5, 4)
    wanted = x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    assert torch.allclose(gated_delta_net.l2norm(x), wanted, rtol=1e-12)
    assert gated_delta_net.l2norm(x.bfloat16()).dtype is torch.bfloat16


@pytest.mark.gpu
@pytest.mark.parametrize("channels", [False, True])
def test_kernels_of_flash_linear_attention(channels):
    """What runs in their place without them; decays of each channel are those of Kimi delta attention."""
    module = pytest.importorskip("fla.ops.kda" if channels else "fla.ops.gated_delta_rule")
    kernel = module.chunk_kda if channels else module.chunk_gated_delta_rule
    torch.manual_seed(0)
    shape = (2, 200, 4, 128)
    q, k, v = (torch.randn(shape, device="cuda") for _ in range(3))
    g = -torch.rand(shape if channels else shape[:-1], device="cuda")
    tensors = [
        gated_delta_net.l2norm(q),
        gated_delta_net.l2norm(k),
        v,
        g,
        torch.rand(shape[:-1], device="cuda"),
    ]
    outputs = []
    for function, dtype in (
        (gated_delta_net.chunk_gated_delta_rule, torch.float32),
        (kernel, torch.bfloat16),
    ):
        given = [one.to(torch.float32 if one is g else dtype).requires_grad_() for one in tensors]
        out, _ = function(*given)
        out.float().square().sum().backward()
        outputs.append([out, *(one.grad for one in given)])
    for expected, found in zip(*outputs, strict=True):
        assert (found - expected).norm() <= 2e-2 * expected.norm()
