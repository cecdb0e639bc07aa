# SPDX-License-Identifier: Apache-2.0
"""Kernels for GPUs equal their formulas in fp64, forward and backward: as written, compiled here, on a GPU."""

import logging
import os
import sysconfig
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce

from megatron.bridge.backends.attention.block_mask import positions_in_sequences
from megatron.bridge.backends.cpu import device as cpu_device
from megatron.bridge.backends.hardware import compiler
from megatron.bridge.backends.kernels import compiled, eager
from megatron.bridge.backends.kernels.compiled import cross_entropy, rms_norm, rotary, rotary_packed

WAYS = [
    "as written",
    pytest.param("inductor", marks=pytest.mark.slow),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


@pytest.fixture(params=WAYS)
def device(request, monkeypatch):
    """Where the kernels run, and whether they are compiled there."""
    if request.param == "inductor":
        monkeypatch.setattr(compiled, "can_compile", lambda: True)
    return "cuda" if request.param == "cuda" else "cpu"


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def close_to_fp64(
    function, reference, *inputs, device="cpu", dtype=torch.bfloat16, fresh=lambda x: x
):
    """``function`` is as near to ``reference`` in fp64 as rounding its results to ``dtype`` allows."""
    low = [x.to(device, dtype).requires_grad_() for x in inputs]
    high = [x.detach().cpu().double().requires_grad_() for x in low]
    found, expected = function(*map(fresh, low)), reference(*high)
    grad = random(*expected.shape, seed=9).to(found)
    pairs = zip(
        [found, *torch.autograd.grad(found, low, grad)],
        [expected, *torch.autograd.grad(expected, high, grad.cpu().double())],
        strict=True,
    )
    rounding = 2**-7 if dtype is torch.bfloat16 else 2**-19
    for value, wanted in pairs:
        allowed = rounding * wanted.abs().max().item()
        torch.testing.assert_close(value.cpu().double(), wanted, rtol=rounding, atol=allowed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_rms_norm(device, dtype, zero_centered):
    def reference(x, weight):
        return F.rms_norm(x, (64,), weight + zero_centered, 1e-5)

    kernel = partial(rms_norm, eps=1e-5, zero_centered=zero_centered)
    inputs = (random(4, 3, 64), 0.1 * random(64, seed=1) + (not zero_centered))
    close_to_fp64(kernel, reference, *inputs, device=device, dtype=dtype)
    heads = random(4, 3, 2, 128)[..., :64]  # of a wider projection, not contiguous
    close_to_fp64(kernel, reference, heads, inputs[1], device=device, dtype=dtype)


def test_a_frozen_norm_passes_gradients_on(device):
    weight = torch.ones(64, device=device)
    close_to_fp64(
        lambda x: rms_norm(x, weight.to(x), 1e-5),
        lambda x: F.rms_norm(x, (64,)),
        random(4, 3, 64),
        device=device,
    )


def angles(rows, width):
    """As Megatron-Core makes them: each frequency twice."""
    half = torch.outer(
        torch.arange(rows).double(), 100.0 ** -torch.linspace(0, 1, width // 2).double()
    )
    return torch.cat((half, half), dim=-1)[:, None, None, :]


def interleaved(turns):
    half = turns[..., : turns.shape[-1] // 2]
    return torch.stack((half, half), dim=-1).flatten(-2)


@pytest.mark.parametrize(("pairs", "mla"), [(False, False), (True, False), (False, True)])
def test_rotary_against_complex_numbers(device, pairs, mla):
    """Channels (a, b) of a pair are a + ib, turned by its angle; channels behind the last pair stay."""
    turns = angles(7, 16)

    def reference(x):
        turned, rest = x[..., :16], x[..., 16:]
        neighbours = pairs or mla
        a, b = (turned[..., ::2], turned[..., 1::2]) if neighbours else turned.chunk(2, dim=-1)
        z = torch.complex(a, b) * torch.polar(torch.full((), 1.5).double(), turns[..., :8])
        together = torch.stack((z.real, z.imag), dim=-1).flatten(-2)
        split = torch.cat((z.real, z.imag), dim=-1)
        return torch.cat((together if pairs else split, rest), dim=-1)

    freqs = (interleaved(turns) if pairs else turns).float().to(device)
    kernel = partial(
        rotary, freqs=freqs, rotary_interleaved=pairs, mla_rotary_interleaved=mla, mscale=1.5
    )
    for dtype in (torch.bfloat16, torch.float32):
        close_to_fp64(kernel, reference, random(7, 2, 3, 24), device=device, dtype=dtype)


def test_rotary_of_packed_sequences_is_that_of_each(device, one_rank):
    bounds = torch.tensor([0, 3, 3, 8, 9], dtype=torch.int32, device=device)
    turns = angles(5, 16)
    group = parallel_state.get_context_parallel_group()
    core = compiled._core_rotary_packed

    def reference(x):
        return core(x, bounds.cpu(), turns, cp_group=group)

    def kernel(x):
        return rotary_packed(x, bounds, turns.float().to(device), cp_group=group)

    close_to_fp64(kernel, reference, random(9, 3, 16), device=device)
    # angles of every token of the row, as models of images have them
    turns = angles(9, 16)
    close_to_fp64(kernel, reference, random(9, 3, 16), device=device)


def test_places_in_sequences():
    bounds = torch.tensor([0, 3, 3, 8, 9], dtype=torch.int32)
    assert positions_in_sequences(bounds, 9).tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 0]


@pytest.mark.parametrize("chunk", [40, 1 << 27])
def test_cross_entropy(device, one_rank, monkeypatch, chunk):
    monkeypatch.setattr(compiled, "CHUNK", chunk)
    target = torch.tensor([[0, 18, 3], [7, 7, 1]])

    def reference(logits):
        return F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view_as(
            target
        )

    def kernel(logits):
        return cross_entropy(logits, target.to(device))

    for dtype in (torch.bfloat16, torch.float32):
        close_to_fp64(kernel, reference, 3 * random(2, 3, 19), device=device, dtype=dtype)


def test_logits_of_an_output_layer_give_way_to_their_gradient(device, one_rank):
    """Half-precision ones too; others stay as they are."""
    hidden, weight = random(6, 1, 8), random(20, 8, seed=1)
    target = torch.randint(0, 20, (6, 1), generator=torch.Generator().manual_seed(2))
    kept = []

    def kernel(hidden, weight):
        kept[:] = [
            linear_with_grad_accumulation_and_async_allreduce(
                hidden, weight, None, False, False, sequence_parallel=False
            )
        ]
        return cross_entropy(kept[0], target.to(device))

    def reference(hidden, weight):
        return F.cross_entropy(
            (hidden @ weight.T).flatten(0, 1), target.flatten(), reduction="none"
        )[:, None]

    close_to_fp64(kernel, reference, hidden, weight, device=device, dtype=torch.float32)
    close_to_fp64(kernel, reference, hidden, weight, device=device)
    sums = kept[0].detach().float().sum(-1)  # of a row of the gradient: softmax minus target
    torch.testing.assert_close(sums, torch.zeros_like(sums), rtol=0, atol=2**-5)
    others = torch.tanh(hidden.to(device).requires_grad_())
    before = others.detach().clone()
    cross_entropy(others, target.to(device) % 8).sum().backward()
    assert torch.equal(others, before)


def test_label_smoothing_is_left_to_megatron_core(one_rank):
    logits, target = random(4, 8), torch.tensor([0, 1, 2, 3])
    smooth = cross_entropy(logits.clone(), target, 0.1)
    torch.testing.assert_close(smooth, eager.core_cross_entropy(logits.clone(), target, 0.1))


def test_without_triton_the_log_says_so_once(monkeypatch, caplog):
    monkeypatch.setattr(compiler, "has_triton", lambda: False)
    monkeypatch.setattr(compiler, "why_not_compiled", compiler.why_not_compiled.__wrapped__)
    monkeypatch.setattr(compiled, "_warned", [])
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            rms_norm(random(2, 8), torch.ones(8), 1e-5)
    (message,) = [record.message for record in caplog.records if "Triton" in record.message]
    assert "run operation by operation" in message


def test_triton_needs_a_c_compiler_and_python_headers(monkeypatch, tmp_path):
    header = tmp_path / "Python.h"
    monkeypatch.setattr(compiler, "has_triton", lambda: True)
    monkeypatch.setattr(sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CC", raising=False)
    why_not_compiled = compiler.why_not_compiled.__wrapped__
    assert "CC" in why_not_compiled()
    monkeypatch.setenv("CC", "cc")
    assert str(header) in why_not_compiled()
    header.touch()
    assert why_not_compiled() is None


def test_without_a_compiler_core_leaves_its_functions_as_they_are(monkeypatch):
    """Its decorators would compile when they are first called, and raise an error in the first step."""
    before = torch.compile
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cpu_device, "installed", lambda: False)
    for reason in (None, "no compiler"):
        monkeypatch.setattr(compiler, "why_not_compiled", lambda reason=reason: reason)
        with cpu_device.core_import_context():
            assert (torch.compile is before) == (reason is None)
    assert torch.compile is before


@pytest.mark.parametrize(
    ("ranks", "asked", "expected"),
    [("1", None, None), ("4", None, "4"), ("64", None, "1"), ("4", "7", "7")],
)
def test_ranks_share_the_cores_for_compiling(monkeypatch, ranks, asked, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    monkeypatch.setenv(compiler.WORKERS_VARIABLE, asked or "")
    if asked is None:
        monkeypatch.delenv(compiler.WORKERS_VARIABLE)
    compiler.share_cores()
    assert os.environ.get(compiler.WORKERS_VARIABLE) == expected


@pytest.mark.slow
def test_a_norm_is_compiled_once_for_each_width_and_then_for_any_rows(monkeypatch):
    """Also with the widths of hidden states and of heads in turn, as in a layer with norms of queries and keys."""
    from torch._dynamo.utils import counters

    monkeypatch.setattr(compiled, "can_compile", lambda: True)
    torch._dynamo.reset()
    counters.clear()
    weights = {width: torch.nn.Parameter(torch.ones(width)) for width in (48, 32)}
    for rows in range(2, 12):
        for width, weight in weights.items():
            rms_norm(random(rows, 1, width).requires_grad_(), weight, 1e-5).sum().backward()
    per_width = 2  # one of the first number of rows, one of any
    assert counters["stats"]["unique_graphs"] <= 2 * per_width * len(weights)


@pytest.mark.slow
def test_a_norm_of_many_forms_stays_compiled(monkeypatch):
    """PyTorch gives up after 8 by default, without an error."""
    from torch._dynamo.utils import counters

    monkeypatch.setattr(compiled, "can_compile", lambda: True)
    torch._dynamo.reset()
    counters.clear()
    widths = range(16, 176, 16)
    for width in widths:
        rms_norm(random(4, width), torch.nn.Parameter(torch.ones(width)), 1e-5)
    assert counters["stats"]["unique_graphs"] == len(widths)


@pytest.mark.parametrize("part", ["rotary", "packed", "loss"])
def test_install_reaches_megatron_core(monkeypatch, part):
    from megatron.core import tensor_parallel
    from megatron.core.optimizer import clip_grads
    from megatron.core.optimizer import optimizer as core_optimizer

    for module, name in (
        (rope_utils, "_apply_rotary_pos_emb_bshd"),
        (rope_utils, "_apply_rotary_pos_emb_thd"),
        (tensor_parallel, "vocab_parallel_cross_entropy"),
        (clip_grads, "multi_tensor_scale_impl"),
        (clip_grads, "l2_norm_impl"),
        (core_optimizer, "multi_tensor_scale_impl"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name))  # put back at the end
    compiled.install()
    found = {
        "rotary": rope_utils._apply_rotary_pos_emb_bshd is rotary,
        "packed": rope_utils._apply_rotary_pos_emb_thd is rotary_packed,
        "loss": tensor_parallel.vocab_parallel_cross_entropy is cross_entropy,
    }
    assert found[part]


# ------------------------------------------------------------------------------------------------------ on a GPU


@pytest.mark.gpu
def test_the_loss_of_a_large_vocabulary_needs_one_block_beside_the_logits(one_rank):
    """1 GB of bf16 logits: Megatron-Core's own takes 2 GB more."""
    hidden = torch.randn(4096, 1, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(128256, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(0, 128256, (4096, 1), device="cuda")
    for _ in range(2):  # the first compiles
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        logits = linear_with_grad_accumulation_and_async_allreduce(
            hidden, weight, None, False, False, sequence_parallel=False
        )
        cross_entropy(logits, target).sum().backward()
        peak = torch.cuda.max_memory_allocated() - before
        del logits
    assert peak < 2 * 4096 * 128256 + 2 * compiled.CHUNK + (100 << 20)


@pytest.mark.gpu
def test_a_norm_keeps_its_input_and_nothing_of_its_size():
    x = torch.randn(8192, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.nn.Parameter(torch.ones(4096, device="cuda", dtype=torch.bfloat16))
    rms_norm(x, weight, 1e-5)
    before = torch.cuda.memory_allocated()
    out = rms_norm(x, weight, 1e-5)
    assert torch.cuda.memory_allocated() - before < out.nbytes + (1 << 20)


@pytest.mark.gpu
def test_swiglu_of_megatron_core_is_compiled():
    """It keeps its input; what is computed between is neither kept nor rounded."""
    from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl

    def reference(x):
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up

    close_to_fp64(lambda x: bias_swiglu_impl(x, None), reference, random(4, 3, 64), device="cuda")
    x = torch.randn(4096, 1, 8192, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    bias_swiglu_impl(x, None)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = bias_swiglu_impl(x, None)
    assert torch.cuda.max_memory_allocated() - before < out.nbytes + (1 << 20)


@pytest.mark.gpu
def test_rotary_keeps_the_angles_only():
    x = torch.randn(4096, 1, 32, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    freqs = angles(4096, 128).float().cuda()
    rotary(x * 1, freqs)
    before = torch.cuda.memory_allocated()
    out = rotary(x * 1, freqs)
    assert torch.cuda.memory_allocated() - before < out.nbytes + (1 << 20)
