# SPDX-License-Identifier: Apache-2.0
"""The C kernels of generation, against formulas in float64."""

import logging

import pytest
import torch
import torch.nn.functional as F

from megatron.bridge.backends.kernels import c_kernels, eager

TOKENS = torch.tensor([[3, 210, 200, 11], [5, 0, 0, 1], [0, 800, 500, 301], [1, 905, 900, 10]])
"""The last token is in a ring."""


def _tensors(dtype: torch.dtype, width: int):
    torch.manual_seed(0)
    caches = tuple(torch.randn(1000, 2, width).to(dtype) for _ in range(2))
    fused = torch.randn(8, 10 * width).to(dtype)  # keys and values are views into it, as in a layer
    query, key, value = fused.split((6 * width, 2 * width, 2 * width), dim=1)
    return (query.reshape(8, 6, width), key.view(8, 2, width), value.view(8, 2, width)), caches


@pytest.mark.parametrize("width", [7, 64, 80, 128])
@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-8)])
def test_attention_is_that_of_float64(dtype, rounding, width):
    new, (keys, values) = _tensors(dtype, width)
    if not c_kernels.is_supported(keys):
        pytest.skip("no C compiler")
    out = torch.zeros_like(new[0])
    c_kernels.attend(new, (keys, values), TOKENS, torch.arange(5), width**-0.5, out)
    for row, place, first, count in TOKENS.tolist():
        assert torch.equal(keys[place], new[1][row])
        assert torch.equal(values[place], new[2][row])
        seen = (cache[first : first + count].transpose(0, 1).double() for cache in (keys, values))
        wanted = F.scaled_dot_product_attention(new[0][row].view(2, 3, width).double(), *seen).view(
            6, width
        )
        torch.testing.assert_close(out[row].double(), wanted, atol=1e-6, rtol=rounding)
        token, alone = torch.tensor([[row, place, first, count]]), torch.zeros_like(out)
        c_kernels.attend(new, (keys, values), token, torch.arange(2), width**-0.5, alone)
        assert torch.equal(alone[row], out[row])
    assert not out[[2, 4, 6, 7]].any()  # rows without a text


@pytest.mark.parametrize("left", [None, 20])  # without and with a window
@pytest.mark.parametrize("width", [7, 64, 80, 128])
@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-8)])
def test_tokens_of_one_text_attend_together(dtype, rounding, width, left):
    torch.manual_seed(0)
    caches = tuple(torch.randn(200, 2, width).to(dtype) for _ in range(2))
    new = tuple(torch.randn(48, heads, width).to(dtype) for heads in (6, 2, 2))
    if not c_kernels.is_supported(caches[0]):
        pytest.skip("no C compiler")

    def run(*texts: tuple[int, int, int, int]) -> torch.Tensor:
        tokens, starts, out = [], [0], torch.zeros_like(new[0])
        for row, count, extent, start in texts:
            for i in range(count):
                first = 0 if left is None else max(0, start + i - left)
                tokens.append((row + i, extent + start + i, extent + first, start + i + 1 - first))
            starts.append(len(tokens))
        c_kernels.attend(new, caches, torch.tensor(tokens), torch.tensor(starts), width**-0.5, out)
        return out

    texts = [(0, 37, 100, 5), (37, 3, 20, 30), (40, 1, 60, 9)]  # 37 tokens are two blocks
    out = run(*texts)
    for row, count, extent, start in texts:
        rows, places = slice(row, row + count), slice(extent + start, extent + start + count)
        assert torch.equal(caches[0][places], new[1][rows])
        assert torch.equal(caches[1][places], new[2][rows])
        seen = [cache[extent : extent + start + count].transpose(0, 1).double() for cache in caches]
        seen = [tensor.repeat_interleave(3, dim=0) for tensor in seen]
        positions, keys = torch.arange(start, start + count)[:, None], torch.arange(start + count)
        mask = (keys <= positions) & (positions - keys <= (1000 if left is None else left))
        wanted = F.scaled_dot_product_attention(
            new[0][rows].transpose(0, 1).double(), *seen, attn_mask=mask
        )
        torch.testing.assert_close(
            out[rows].double(), wanted.transpose(0, 1), atol=1e-6, rtol=rounding
        )
        assert torch.equal(run((row, count, extent, start))[rows], out[rows])


@pytest.mark.parametrize("count", [8, 200])  # with one thread and with several
def test_tokens_see_keys_that_the_same_call_stores(count):
    new = tuple(torch.randn(count, heads, 64) for heads in (6, 2, 2))
    tokens = torch.tensor([(i, i, 0, i + 1) for i in range(count)])
    if not c_kernels.is_supported(new[0]):
        pytest.skip("no C compiler")
    found = []
    for table in (tokens, tokens.flip(0)):  # threads may take them in any order
        caches, out = (
            tuple(torch.full((count, 2, 64), float("nan")) for _ in range(2)),
            torch.zeros_like(new[0]),
        )
        c_kernels.attend(new, caches, table, torch.arange(count + 1), 0.125, out)
        found.append(out)
    assert torch.equal(*found)
    assert not found[0].isnan().any()


def test_not_a_number_is_not_hidden():
    new, caches = _tensors(torch.float32, 64)
    if not c_kernels.is_supported(caches[0]):
        pytest.skip("no C compiler")
    caches[0][205] = float("nan")
    out = torch.zeros_like(new[0])
    c_kernels.attend(new, caches, TOKENS, torch.arange(5), 0.125, out)
    assert out[3].isnan().all()
    assert not out[5].isnan().any()


def _operations(x: torch.Tensor, gain: torch.Tensor, angles: torch.Tensor) -> list[torch.Tensor]:
    """A norm over all features, embeddings of heads that are views of wider rows, and SwiGLU of two halves."""
    heads = x.view(len(x), 1, 4, -1)[..., 8 : 8 + angles.size(-1)]
    return [eager.rms_norm(x, gain, 1e-5), eager.rotary(heads, angles[: len(x)]), eager.swiglu(x)]


@torch.inference_mode()
@pytest.mark.parametrize("width", [36, 72, 256])
@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 2e-6), (torch.bfloat16, 2**-7)])
def test_small_operations_are_those_of_float64(dtype, rounding, width):
    torch.manual_seed(1)
    x, gain = (3 * torch.randn(100, 1, 4 * width)).to(dtype), torch.randn(4 * width).to(dtype)
    angles = 9 * torch.rand(100, 1, 1, width - 8)
    if not c_kernels.is_supported(x):
        pytest.skip("no C compiler")
    wanted = _operations(x.double(), gain.double(), angles.double())
    pytorch = _operations(x, gain, angles)
    with c_kernels.in_use():
        found, alone = _operations(x, gain, angles), _operations(x[:1].clone(), gain, angles)
    for index, (one, other) in enumerate(zip(found, alone, strict=True)):
        assert one.dtype == dtype
        assert torch.equal(one[:1], other)  # a row has the same bits in any batch
        if index == 1 and dtype == torch.bfloat16:  # cosines and products are rounded
            assert torch.equal(one, pytorch[index])
        else:
            torch.testing.assert_close(one.double(), wanted[index], atol=rounding, rtol=rounding)


def test_training_keeps_its_own_operators():
    with c_kernels.in_use():
        assert c_kernels.takes(torch.zeros(1)) == c_kernels.is_supported(torch.zeros(1))
    assert not c_kernels.takes(torch.zeros(1))


@pytest.mark.parametrize(
    ("command", "word"), [("no-such-compiler -m64", "no-such-compiler"), ("cc '", "quot")]
)
def test_a_machine_without_a_compiler_is_told_once(monkeypatch, caplog, command, word):
    monkeypatch.setenv("CC", command)
    monkeypatch.setattr(c_kernels, "_load_library", c_kernels._load_library.__wrapped__)
    with caplog.at_level(logging.WARNING):
        assert not c_kernels.is_supported(torch.zeros(1, 1, 8))
    assert word in caplog.text
    assert not c_kernels.is_supported(torch.zeros(1, 1, 8, dtype=torch.float16))  # another kernel's
