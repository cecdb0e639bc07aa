# SPDX-License-Identifier: Apache-2.0
"""Weights in few bits: codes and numbers against naive loops and bitsandbytes, and what autograd keeps of them."""

import pytest
import torch
from torch import nn

from megatron.bridge.backends.low_bit.formats import FORMATS, MXFP4, NF4
from megatron.bridge.backends.low_bit.weight import LowBitWeight, empty_weight, stored_bytes
from megatron.bridge.backends.moe.grouped_experts import grouped_matmul
from tests.quantize import E2M1

ROWS, COLUMNS = 6, 256
# the published quantiles, to 7 digits
QUANTILES = [-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0]
QUANTILES += [0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0]


def matrix(dtype=torch.float32):
    generator = torch.Generator().manual_seed(7)
    values = torch.randn(ROWS, COLUMNS, generator=generator)
    values[1, 64:128] = 0.0
    values[2] *= 1e-3
    return values.to(dtype)


def quantized(name, dtype=torch.float32):
    full = matrix(dtype)
    weight = empty_weight(FORMATS[name], full)
    weight.set_values(full)
    return full, nn.Parameter(weight, requires_grad=False)


def test_codes_are_the_nearest_quantiles():
    full = matrix()
    codes, scales = NF4.quantize(full)
    for row in range(ROWS):
        for group in range(COLUMNS // 64):
            numbers = full[row, 64 * group : 64 * (group + 1)].tolist()
            largest = max(map(abs, numbers))
            assert scales[row, group].item() == largest
            for index, number in enumerate(numbers):
                byte = codes[row, 32 * group + index // 2].item()
                code = byte & 15 if index % 2 else byte >> 4
                scaled = number / (largest or 1.0)
                nearest = min(range(16), key=lambda one: abs(QUANTILES[one] - scaled))
                error = abs(QUANTILES[code] - scaled) - abs(QUANTILES[nearest] - scaled)
                assert error < 1e-6, (row, group, index)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_and_numbers_are_those_of_bitsandbytes(dtype):
    functional = pytest.importorskip("bitsandbytes.functional")
    full = matrix(dtype)
    codes, scales = NF4.quantize(full)
    packed, state = functional.quantize_4bit(full, quant_type="nf4", blocksize=64)
    assert torch.equal(codes.flatten(), packed.flatten())
    assert torch.equal(scales.flatten(), state.absmax)
    dequantized = NF4.dequantize(codes, scales, dtype)
    assert torch.equal(dequantized, functional.dequantize_4bit(packed, state))


def test_mxfp4_numbers_one_by_one():
    codes, scales = MXFP4.quantize(matrix())
    numbers = MXFP4.dequantize(codes, scales, torch.float32)
    for row, line in enumerate(numbers.tolist()):
        for column, number in enumerate(line):
            byte = codes[row, column // 2].item()
            code = byte >> 4 if column % 2 else byte & 15
            assert number == E2M1[code] * 2.0 ** (scales[row, column // 32].item() - 127)


@pytest.mark.parametrize(("name", "error"), [("nf4", 0.1), ("fp8", 0.03), ("mxfp4", 0.12)])
def test_errors_and_bytes(name, error):
    full, weight = quantized(name)
    numbers = weight.dequantized()
    assert (numbers - full).norm() < error * full.norm()
    assert torch.equal(numbers[1, 64:128], torch.zeros(64))
    assert stored_bytes(weight) * 8 == FORMATS[name].bits * full.numel()
    again = empty_weight(FORMATS[name], full)
    again.set_values(numbers)
    assert torch.equal(again.dequantized(), numbers)


@pytest.mark.parametrize("name", list(FORMATS))
def test_gradients_are_those_of_the_numbers(name):
    _, weight = quantized(name)
    x = torch.randn(5, COLUMNS, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    out = nn.functional.linear(x, weight)
    reference = nn.functional.linear(y, weight.dequantized())
    out.square().sum().backward()
    reference.square().sum().backward()
    assert torch.equal(out, reference)
    assert torch.equal(x.grad, y.grad)


def kept_for_backward(compute):
    """Sizes in bytes of what autograd saves, except inputs."""
    kept = []

    def note(tensor):
        kept.append(stored_bytes(tensor))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        compute()
    return kept


def test_only_codes_are_kept_for_the_backward_pass():
    full, weight = quantized("nf4")
    x = torch.randn(2, COLUMNS, requires_grad=True)
    assert max(kept_for_backward(lambda: nn.functional.linear(x, weight))) < full.nbytes / 2
    experts = [quantized("nf4")[1] for _ in range(3)]
    out = kept_for_backward(lambda: grouped_matmul(x, [1, 0, 1], experts))
    assert max(out) < full.nbytes / 2


@pytest.mark.parametrize("name", list(FORMATS))
def test_conversions_keep_codes_and_notes(name):
    _, weight = quantized(name)
    weight.tensor_model_parallel = True
    module = nn.Module()
    module.weight = weight
    module.float().requires_grad_(False)
    assert module.weight is weight
    moved = module.to("meta").weight
    assert isinstance(moved, LowBitWeight)
    assert moved.codes.is_meta
    assert moved.tensor_model_parallel
    assert moved.low_bit_format is FORMATS[name]


def test_a_copy_into_it_is_quantized():
    full, weight = quantized("fp8")
    with torch.no_grad():
        weight.copy_(2 * full)
    assert isinstance(weight, LowBitWeight)
    assert torch.equal(weight.dequantized(), 2 * quantized("fp8")[1].dequantized())
