# SPDX-License-Identifier: Apache-2.0
"""A row times a packed weight has the same bits for any number of rows that is a multiple of 8."""

import pytest
import torch

from megatron.bridge.backends.decoding.packed_linear import PanelWeight, can_pack, pack_weight
from megatron.bridge.backends.kernels import c_kernels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1024, 48), (2048, 256), (96, 48), (1024, 576), (576, 1536)])
def test_the_number_of_rows_does_not_matter(shape, dtype):
    weight = torch.randn(shape, dtype=dtype)
    if not can_pack(weight):
        pytest.skip("needs AVX-512 or a C compiler")
    packed, x = pack_weight(weight), torch.randn(184, shape[1], dtype=dtype)
    expected = packed(x)
    torch.testing.assert_close(
        expected, x @ weight.T, rtol=2e-2, atol=2e-2 if dtype == torch.bfloat16 else 1e-4
    )
    for rows in (8, 16, 24, 64):
        assert torch.equal(packed(x[:rows]), expected[:rows]), rows
        assert torch.equal(packed(x[:rows, None]), expected[:rows, None]), rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1024, 48), (50, 300), (96, 1), (7, 576)])
def test_panels_multiply_in_float32_and_round_once(shape, dtype):
    weight, bias = torch.randn(shape, dtype=dtype), torch.randn(shape[0], dtype=dtype)
    if not c_kernels.is_supported(weight):
        pytest.skip("needs a C compiler")
    packed, x = PanelWeight(weight), torch.randn(45, shape[1], dtype=dtype)
    assert torch.equal(packed.unpacked(), weight)
    expected = x.double() @ weight.double().T
    rounding = 1e-5 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(packed(x).double(), expected, rtol=rounding, atol=1e-4)
    torch.testing.assert_close(
        packed(x, bias).double(), expected + bias.double(), rtol=rounding, atol=1e-4
    )
    for rows in range(1, 45):
        assert torch.equal(packed(x[:rows, None], bias), packed(x, bias)[:rows, None]), rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("repeats", [[7], [1, 6], [3, 1, 4], [1] * 8, [2, 2, 2, 2, 2, 2, 3]])
def test_rows_that_repeat_have_the_bits_of_one(repeats, dtype):
    """Padding repeats a row, which is multiplied once; also where it comes between others, or is NaN."""
    weight, bias = torch.randn(50, 300, dtype=dtype), torch.randn(50, dtype=dtype)
    if not c_kernels.is_supported(weight):
        pytest.skip("needs a C compiler")
    packed, different = PanelWeight(weight), torch.randn(len(repeats), 300, dtype=dtype)
    different[-1, 0] = torch.nan
    expected = torch.cat([packed(row[None], bias) for row in different])
    counts = torch.tensor(repeats)
    found = packed(different.repeat_interleave(counts, dim=0), bias)
    assert torch.equal(found.nan_to_num(), expected.repeat_interleave(counts, dim=0).nan_to_num())
    assert found[-1].isnan().all()
