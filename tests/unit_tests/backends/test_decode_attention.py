# SPDX-License-Identifier: Apache-2.0
"""The C kernel for single tokens, against attention in float64."""

import logging

import pytest
import torch
import torch.nn.functional as F

from megatron.bridge.backends.kernels import decode_attention

TEXTS = torch.tensor([[3, 210, 200, 11], [5, 0, 0, 1], [0, 800, 500, 301], [1, 905, 900, 10]])  # the last one is a ring


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
    if not decode_attention.can_attend(keys):
        pytest.skip("no C compiler")
    out = torch.zeros_like(new[0])
    decode_attention.attend(new, (keys, values), TEXTS, width**-0.5, out)
    for row, place, first, count in TEXTS.tolist():
        assert torch.equal(keys[place], new[1][row])
        assert torch.equal(values[place], new[2][row])
        seen = (cache[first : first + count].transpose(0, 1).double() for cache in (keys, values))
        wanted = F.scaled_dot_product_attention(new[0][row].view(2, 3, width).double(), *seen).view(6, width)
        torch.testing.assert_close(out[row].double(), wanted, atol=1e-6, rtol=rounding)
        alone = torch.zeros_like(out)
        decode_attention.attend(new, (keys, values), torch.tensor([[row, place, first, count]]), width**-0.5, alone)
        assert torch.equal(alone[row], out[row])
    assert not out[[2, 4, 6, 7]].any()  # rows without a text


def test_not_a_number_is_not_hidden():
    new, caches = _tensors(torch.float32, 64)
    if not decode_attention.can_attend(caches[0]):
        pytest.skip("no C compiler")
    caches[0][205] = float("nan")
    out = torch.zeros_like(new[0])
    decode_attention.attend(new, caches, TEXTS, 0.125, out)
    assert out[3].isnan().all()
    assert not out[5].isnan().any()


def test_a_machine_without_a_compiler_is_told_once(monkeypatch, caplog):
    monkeypatch.setenv("CC", "no-such-compiler -m64")
    monkeypatch.setattr(decode_attention, "_library", decode_attention._library.__wrapped__)
    with caplog.at_level(logging.WARNING):
        assert not decode_attention.can_attend(torch.zeros(1, 1, 8))
    assert "no-such-compiler" in caplog.text
    assert not decode_attention.can_attend(torch.zeros(1, 1, 8, dtype=torch.float16))  # another kernel's
