# SPDX-License-Identifier: Apache-2.0
"""Linear layers by oneDNN, against the same layers of Megatron-Core."""

from typing import Any

import pytest
import torch

from megatron.bridge.backends.kernels import onednn_linear

SETTINGS = {
    "gradient_accumulation_fusion": False,
    "allreduce_dgrad": False,
    "sequence_parallel": False,
    "grad_output_buffer": None,
    "wgrad_deferral_limit": None,
    "tp_group": None,
    "gtp_remat_size": 1,
}


def naive(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, **_: Any
) -> torch.Tensor:
    output = x @ weight.t()
    return output if bias is None else output + bias


def results(linear: Any, frozen: bool, with_bias: bool) -> list[torch.Tensor | None]:
    torch.manual_seed(0)
    x = torch.randn(70, 2, 300, requires_grad=True)
    weight = torch.randn(260, 300, requires_grad=not frozen)
    bias = torch.randn(260, requires_grad=True) if with_bias else None
    output = linear(x, weight, bias, **SETTINGS)
    output.backward(torch.randn(2, 260, 70).permute(2, 0, 1))  # gradients need not be contiguous
    return [output, x.grad, weight.grad, bias.grad if bias is not None else None]


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
def test_outputs_and_gradients_are_those_of_a_plain_product(frozen: bool, with_bias: bool) -> None:
    def refused(*_: Any, **__: Any) -> torch.Tensor:
        raise AssertionError("this product should be oneDNN's")

    ours, plain = (
        results(onednn_linear.replacing(refused), frozen, with_bias),
        results(naive, frozen, with_bias),
    )
    for found, expected in zip(ours, plain, strict=True):
        assert (found is None) == (expected is None)
        if found is not None and expected is not None:
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("rows", "features", "dtype", "changed"),
    [
        (127, 256, torch.float32, {}),
        (128, 255, torch.float32, {}),
        (128, 256, torch.bfloat16, {}),
        (128, 256, torch.float32, {"sequence_parallel": True}),
        (128, 256, torch.float32, {"gradient_accumulation_fusion": True}),
        (128, 256, torch.float32, {"grad_output_buffer": []}),
        (128, 256, torch.float32, {"gtp_remat_size": 2}),
    ],
)
def test_what_onednn_computes_no_faster_is_left_to_megatron_core(
    rows: int, features: int, dtype: torch.dtype, changed: dict[str, Any]
) -> None:
    calls = []

    def linear(*_: Any, **settings: Any) -> torch.Tensor:
        calls.append(settings)
        return torch.zeros(())

    x, weight = torch.zeros(rows, 256, dtype=dtype), torch.zeros(features, 256, dtype=dtype)
    onednn_linear.replacing(linear)(x, weight, None, **SETTINGS | changed)
    assert calls == [SETTINGS | changed]
