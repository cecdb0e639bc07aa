# SPDX-License-Identifier: Apache-2.0
"""Kernels equal what PyTorch computes operation by operation, forward and backward."""

import pytest
import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.bridge.backends.kernels import eager
from megatron.bridge.backends.kernels.eager import (
    cross_entropy,
    fuses_activation,
    l2_norm,
    rms_norm,
    scale,
    swiglu,
)


def random(*shape, dtype=torch.float64, seed=0):
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def close_to_fp64(function, reference, *inputs):
    """In bf16, ``function`` is as near to ``reference`` in fp64 as rounding its result allows, gradients too."""
    low = [x.to(torch.bfloat16).requires_grad_() for x in inputs]
    high = [x.detach().double().requires_grad_() for x in low]
    found, expected = function(*low), reference(*high)
    grad = random(*expected.shape, seed=9).to(found.dtype)
    pairs = zip(
        [found, *torch.autograd.grad(found, low, grad)],
        [expected, *torch.autograd.grad(expected, high, grad.double())],
        strict=True,
    )
    for value, wanted in pairs:
        torch.testing.assert_close(
            value.double(), wanted, rtol=2**-7, atol=2**-7 * wanted.abs().max().item()
        )


def plain_swiglu(x):
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def test_rms_norm():
    x, gain = random(3, 4, 10).requires_grad_(), random(10, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, gain: rms_norm(x, gain, 1e-5), (x, gain))
    torch.testing.assert_close(rms_norm(x, gain, 1e-5), F.rms_norm(x, (10,), gain, 1e-5))
    close_to_fp64(
        lambda x, gain: rms_norm(x, gain, 1e-5),
        lambda x, gain: F.rms_norm(x, (64,), gain, 1e-5),
        random(8, 64),
        gain64(),
    )


def test_rms_norm_of_heads_that_are_not_contiguous():
    x, gain = random(3, 4, 10).transpose(0, 1).requires_grad_(), random(10, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, gain: rms_norm(x, gain, 1e-5), (x, gain))


def test_a_frozen_norm_passes_gradients_on():
    x, gain = random(3, 4, 10).requires_grad_(), random(10, seed=1)
    assert torch.autograd.gradcheck(lambda x: rms_norm(x, gain, 1e-5), (x,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_embedding_has_the_bits_of_megatron_core(dtype):
    freqs = random(
        6, 1, 1, 8
    )  # the halves differ, so the gradient needs the angles of the other half
    for factor in (1.0, 1.3, 1.0):
        x, y = (random(6, 2, 3, 8, dtype=dtype).requires_grad_() for _ in range(2))
        found, wanted = (
            eager.rotary(x, freqs, mscale=factor),
            eager.core_rotary(y, freqs, mscale=factor),
        )
        assert torch.equal(found, wanted)
        grad = random(6, 2, 3, 8, dtype=dtype, seed=1)
        assert torch.equal(
            *(torch.autograd.grad(out, at, grad)[0] for out, at in ((found, x), (wanted, y)))
        )
        with torch.inference_mode():
            assert torch.equal(eager.rotary(x, freqs, mscale=factor), wanted)


@pytest.mark.parametrize(
    "options", [{"rotary_interleaved": True}, {"mla_rotary_interleaved": True}, {}]
)
def test_other_rotary_embeddings_are_megatron_cores(options):
    x, freqs = random(6, 2, 3, 8), random(6, 1, 1, 8 if options else 4)
    assert torch.equal(eager.rotary(x, freqs, **options), eager.core_rotary(x, freqs, **options))


def test_gradients_in_bf16_are_summed_in_fp32(monkeypatch):
    monkeypatch.setattr(eager, "CHUNK", 7)
    layer = torch.nn.Linear(5, 4, bias=False, dtype=torch.bfloat16)
    layer.weight.main_grad, layer.weight.grad_added_to_main_grad = torch.zeros(4, 5), False
    texts, sums = random(3, 2, 5, dtype=torch.bfloat16), torch.zeros(4, 5)
    for text in texts:
        sums += torch.autograd.grad(layer(text).sum(), layer.weight)[0]
    eager.accumulate_by_parts(layer)
    for text in texts:
        layer(text).sum().backward()
        layer.weight.grad = None
    assert torch.equal(layer.weight.main_grad, sums)
    assert layer.weight.grad_added_to_main_grad


def gain64():
    return random(64, seed=1) * 0.1 + 1


def test_swiglu():
    x, bias = random(3, 4, 10).requires_grad_(), random(10, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(swiglu, (x,))
    assert torch.autograd.gradcheck(swiglu, (x, bias))
    torch.testing.assert_close(swiglu(x), plain_swiglu(x))
    close_to_fp64(swiglu, plain_swiglu, random(8, 64))


@pytest.mark.parametrize("chunk", [1, 40, 1 << 18])
def test_cross_entropy(one_rank, monkeypatch, chunk):
    monkeypatch.setattr(eager, "CHUNK", chunk)
    target = torch.tensor([[0, 18, 3], [7, 7, 1]])
    logits = (3 * random(2, 3, 19)).requires_grad_()
    assert torch.autograd.gradcheck(lambda logits: cross_entropy(logits, target), (logits,))

    def reference(logits):
        return F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view_as(
            target
        )

    torch.testing.assert_close(cross_entropy(logits, target), reference(logits))
    close_to_fp64(lambda logits: cross_entropy(logits, target), reference, 3 * random(2, 3, 19))


def test_logits_of_an_output_layer_give_way_to_their_gradient(one_rank):
    """And to nothing else: a second backward pass says so, and other logits stay as they are."""
    hidden, weight = (
        random(6, 1, 8, dtype=torch.float32),
        random(20, 8, dtype=torch.float32, seed=1),
    )
    target = torch.randint(0, 20, (6, 1), generator=torch.Generator().manual_seed(2))
    scale = random(6, 1, dtype=torch.float32, seed=3)
    leaves = [tensor.clone().requires_grad_() for tensor in (hidden, weight, hidden, weight)]
    logits = linear_with_grad_accumulation_and_async_allreduce(
        leaves[0], leaves[1], None, False, False, sequence_parallel=False
    )
    loss = (cross_entropy(logits, target) * scale).sum()
    plain = F.linear(leaves[2], leaves[3])
    expected = (
        F.cross_entropy(plain.flatten(0, 1), target.flatten(), reduction="none")[:, None] * scale
    ).sum()
    torch.testing.assert_close(loss, expected)
    loss.backward(retain_graph=True)
    expected.backward()
    torch.testing.assert_close(leaves[0].grad, leaves[2].grad)
    torch.testing.assert_close(leaves[1].grad, leaves[3].grad)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    for others in (torch.tanh(hidden.requires_grad_()), hidden.detach()):
        before = others.detach().clone()
        cross_entropy(others, target % 8)
        assert torch.equal(others, before)


def test_logits_that_are_masked_out_get_no_gradient(one_rank):
    logits = random(4, 8, dtype=torch.float32)
    logits[:, 6:] = torch.finfo(torch.float32).min
    logits.requires_grad_()
    loss = cross_entropy(logits, torch.tensor([0, 1, 2, 3]))
    torch.testing.assert_close(
        loss, F.cross_entropy(logits[:, :6], torch.tensor([0, 1, 2, 3]), reduction="none")
    )
    loss.sum().backward()
    assert not logits.grad[:, 6:].any()
    assert logits.grad.isfinite().all()


def test_label_smoothing_is_left_to_megatron_core(one_rank):
    logits, target = random(4, 8, dtype=torch.float32), torch.tensor([0, 1, 2, 3])
    smooth = cross_entropy(logits.clone(), target, 0.1)
    torch.testing.assert_close(smooth, eager.core_cross_entropy(logits.clone(), target, 0.1))


def test_scaling_changes_gradients_in_place_or_into_a_target():
    tensors = [random(5), random(2, 3, seed=1)]
    expected = [tensor * 0.3 for tensor in tensors]
    other = [torch.zeros_like(tensor) for tensor in tensors]
    scale(0, None, [tensors, other], 0.3)
    torch.testing.assert_close(other, expected)
    scale(0, None, [tensors, tensors], 0.3)
    torch.testing.assert_close(tensors, expected)


def test_scaling_by_one_rounds_parameters_to_their_dtype():
    master = [random(5, dtype=torch.float32), random(2, 3, dtype=torch.float32, seed=1)]
    parameters = [torch.zeros_like(tensor, dtype=torch.bfloat16) for tensor in master]
    scale(0, None, [master, parameters], 1.0)
    for tensor, parameter in zip(master, parameters, strict=True):
        assert torch.equal(parameter, tensor.bfloat16())


def test_the_norm_of_gradients_is_that_of_all_together():
    tensors = [random(5, dtype=torch.float32), random(2, 3, dtype=torch.float32, seed=1)]
    norm, _ = l2_norm(0, None, [tensors], False)
    expected = torch.cat([tensor.flatten() for tensor in tensors]).double().square().sum().sqrt()
    torch.testing.assert_close(norm.double(), expected.reshape(1), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("values", "fused"),
    [
        ({}, True),
        ({"activation_func": F.gelu}, False),
        ({"gated_linear_unit": False}, False),
        ({"activation_func_clamp_value": 7.0}, False),
        ({"glu_linear_offset": 1.0}, False),
        ({"num_moe_experts": 2}, False),
    ],
)
def test_only_plain_swiglu_is_fused(values, fused):
    settings = {
        "activation_func": F.silu,
        "gated_linear_unit": True,
        "add_bias_linear": False,
    } | values
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, **settings)
    assert fuses_activation(config) is fused
