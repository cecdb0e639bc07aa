# SPDX-License-Identifier: Apache-2.0
"""A row times a packed weight has the same bits for any number of rows that is a multiple of 8."""

import pytest
import torch

from megatron.bridge.backends.decoding.packed_linear import PackedWeight, can_pack


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1024, 48), (2048, 256), (96, 48), (1024, 576), (576, 1536)])
def test_the_number_of_rows_does_not_matter(shape, dtype):
    weight = torch.randn(shape, dtype=dtype)
    if not can_pack(weight):
        pytest.skip("needs AVX-512")
    packed, x = PackedWeight(weight), torch.randn(184, shape[1], dtype=dtype)
    expected = packed(x)
    torch.testing.assert_close(
        expected, x @ weight.T, rtol=2e-2, atol=2e-2 if dtype == torch.bfloat16 else 1e-4
    )
    for rows in (8, 16, 24, 64):
        assert torch.equal(packed(x[:rows]), expected[:rows]), rows
        assert torch.equal(packed(x[:rows, None]), expected[:rows, None]), rows
