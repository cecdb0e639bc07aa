# SPDX-License-Identifier: Apache-2.0
"""The numbers of quantization-aware training are those that an export stores, bit by bit."""

import gc
import typing

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.bridge.backends.low_bit.rounded_layers import (
    RoundedProducts,
    fix_rounded_weights,
    round_products,
    row_order_of_heads,
)
from megatron.bridge.backends.low_bit.rounding import ROUNDINGS, QATFormat
from megatron.bridge.models.hf_pretrained.written_formats import WRITTEN_FORMATS, outline

SIZES = {"fp8-block": 32, "int4": 64, "int4-awq": 64}


def test_there_is_a_rounding_for_each_written_format():
    assert set(ROUNDINGS) == set(WRITTEN_FORMATS) == set(typing.get_args(QATFormat))
    for name, rounding in ROUNDINGS.items():
        row = WRITTEN_FORMATS[name]
        assert rounding.is_size_free == (row.group_size is not None)
        assert rounding.has_tensor_scale == row.shares_scale
        if rounding.is_size_free:
            assert rounding.size == row.group_size


def stored_and_read(name, weight):
    """What an export stores for a weight, read again."""
    row = WRITTEN_FORMATS[name]
    stored_as = outline(row, "layer.weight", tuple(weight.shape), weight.dtype, SIZES.get(name, 0))
    largest = weight.abs().amax().float() if row.shares_scale else None
    stored = stored_as.tensor.encode(weight, largest) | stored_as.constants
    read = torch.empty_like(weight)
    stored_as.tensor.fill(stored, (), read)
    return read


def weights():
    """Matrices of several shapes of distribution."""
    torch.manual_seed(0)
    normal = torch.randn(64, 256)
    by_row = normal * torch.logspace(-3, 1, 64)[:, None]
    with_zeros = by_row.clone()
    with_zeros[:20] = 0
    with_zeros[:, :128] = 0
    return {
        "rows of different sizes": by_row,
        "outliers": normal * torch.randn(64, 256).exp(),
        "rows and columns of zeros": with_zeros,
        "halfway between codes": (normal * 8).round() / 8,
        "small and positive": normal.abs() * 1e-5,
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ROUNDINGS)
def test_rounded_weights_are_those_that_an_export_stores(name, dtype):
    rounding = ROUNDINGS[name]
    for full_weight in weights().values():
        weight = full_weight.to(dtype)
        rounded = rounding.round(
            weight, rounding.magnitudes(weight, SIZES.get(name)), SIZES.get(name)
        )
        assert torch.equal(rounded, stored_and_read(name, weight))


def rounded_linear(name, inputs=False, rows=64, **settings):
    torch.manual_seed(0)
    layer = nn.Linear(64, rows, bias=False)
    products = RoundedProducts(
        name, SIZES.get(name), ("weight",), inputs, split=None, group=None, **settings
    )
    round_products(layer, products)
    return layer


@pytest.mark.parametrize("name", ROUNDINGS)
def test_gradients_pass_unchanged(name):
    """Product, its gradients and the parameter, against a naive product with what an export stores."""
    layer = rounded_linear(name)
    inputs = torch.randn(8, 64, requires_grad=True)
    layer(inputs).square().sum().backward()

    weight = stored_and_read(name, layer.weight.detach())
    product = inputs.detach() @ weight.t()
    torch.testing.assert_close(layer.weight.grad, 2 * product.t() @ inputs.detach())
    torch.testing.assert_close(inputs.grad, 2 * product @ weight)
    assert isinstance(layer.weight, nn.Parameter)
    assert not torch.equal(layer.weight.detach(), weight)


def nearest_codes(name, numbers):
    if name == "int8":
        return numbers.round()
    return numbers.to(torch.float8_e4m3fn).float()


def naive_inputs(name, inputs):
    """Inputs as kernels of engines round them, token by token, in a loop."""
    width = SIZES[name] if name == "fp8-block" else inputs.shape[1]
    rounded = torch.empty_like(inputs)
    for row in range(inputs.shape[0]):
        for start in range(0, inputs.shape[1], width):
            part = inputs[row, start : start + width]
            scale = part.abs().max() / (127 if name == "int8" else 448)
            rounded[row, start : start + width] = nearest_codes(name, part / scale) * scale
    return rounded


@pytest.mark.parametrize("name", ["int8", "fp8-tensor", "fp8-block"])
def test_inputs_are_rounded_token_by_token(name):
    layer = rounded_linear(name, inputs=True)
    inputs = (torch.randn(8, 64) * torch.logspace(-2, 2, 8)[:, None]).requires_grad_()
    outputs = layer(inputs)
    weight = stored_and_read(name, layer.weight.detach())
    torch.testing.assert_close(outputs, naive_inputs(name, inputs.detach()) @ weight.t())
    outputs.sum().backward()
    torch.testing.assert_close(inputs.grad, weight.sum(0).expand(8, 64))


def test_inputs_are_kept_where_engines_keep_them():
    for name in set(ROUNDINGS) - {"int8", "fp8-tensor", "fp8-block"}:
        inputs = torch.randn(8, 64)
        with_inputs = rounded_linear(name, inputs=True)(inputs)
        assert torch.equal(with_inputs, rounded_linear(name)(inputs))


class WatchedLinear(nn.Linear):
    """Notes the memory of the weights that it computes with."""

    def forward(self, inputs):
        self.seen = StorageWeakRef(self._parameters["weight"].untyped_storage())
        return super().forward(inputs)


def test_autograd_keeps_no_rounded_weight():
    layer = rounded_linear("int8")
    layer.__class__ = WatchedLinear
    outputs = layer(torch.randn(8, 64))
    gc.collect()
    assert layer.seen.expired()
    outputs.sum().backward()
    assert layer.weight.grad is not None


def test_a_failed_pass_leaves_the_parameters():
    layer = rounded_linear("int8")
    parameter = layer.weight
    with pytest.raises(RuntimeError):
        layer(torch.randn(8, 3))
    assert layer.weight is parameter


def test_blocks_do_not_cross_from_queries_to_keys():
    """A fused projection of 2 groups, each with 2 heads of queries, a key and a value."""
    order = row_order_of_heads(128, groups=2, width=16)
    layer = rounded_linear("fp8-block", rows=128, row_order=order)
    weight = layer.weight.detach().clone().view(2, 4, 16, 64)
    parts = [weight[:, :2], weight[:, 2], weight[:, 3]]
    expected = [stored_and_read("fp8-block", part.reshape(-1, 64)) for part in parts]
    fix_rounded_weights(layer)
    fixed = layer.weight.detach().view(2, 4, 16, 64)
    for part, rounded in zip((fixed[:, :2], fixed[:, 2], fixed[:, 3]), expected, strict=True):
        assert torch.equal(part.reshape(-1, 64), rounded)


def test_fixed_weights_are_final():
    layer = rounded_linear("int4")
    inputs = torch.randn(8, 64)
    expected = layer(inputs)
    fix_rounded_weights(layer)
    assert torch.equal(layer(inputs), expected)
    assert "forward" not in vars(layer)
