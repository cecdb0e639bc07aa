# SPDX-License-Identifier: Apache-2.0
"""Norms equal those of transformers, and take part in sequence parallelism."""

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from megatron.bridge.backends.kernels.norms import LayerNorm, RMSNorm, TorchNorm

SIZE, EPS = 48, 1e-5


def build(dtype=torch.float32, **settings):
    config = TransformerConfig(
        num_layers=1,
        hidden_size=SIZE,
        num_attention_heads=4,
        params_dtype=dtype,
        use_cpu_initialization=True,
        **{"normalization": "RMSNorm", **settings},
    )
    norm = TorchNorm(config=config, hidden_size=SIZE, eps=EPS)
    torch.nn.init.normal_(norm.weight, generator=torch.Generator().manual_seed(1))
    return norm


def reference(norm, kind):
    other = kind(SIZE, eps=EPS).to(norm.weight.dtype)
    other.load_state_dict(norm.state_dict())
    return other


def values(dtype=torch.float32):
    x = torch.randn(7, 2, SIZE, generator=torch.Generator().manual_seed(2)) * 3 + 1
    return x.to(dtype)


CASES = [
    pytest.param({}, LlamaRMSNorm, id="rms"),
    pytest.param({"layernorm_zero_centered_gamma": True}, GemmaRMSNorm, id="zero-centred"),
    pytest.param({"normalization": "LayerNorm"}, torch.nn.LayerNorm, id="layer"),
]


@pytest.mark.parametrize(("settings", "kind"), CASES)
def test_equals_transformers_in_fp32(settings, kind):
    norm = build(**settings)
    other = reference(norm, kind)
    x, y = values().requires_grad_(), values().requires_grad_()
    torch.testing.assert_close(norm(x), other(y), atol=1e-6, rtol=1e-6)
    weight = values().flip(0)
    (norm(x) * weight).sum().backward()
    (other(y) * weight).sum().backward()
    torch.testing.assert_close(x.grad, y.grad, atol=2e-6, rtol=1e-5)
    for mine, theirs in zip(norm.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("settings", "kind"), CASES)
def test_low_precision_is_rounded_once(settings, kind):
    """bf16 in and out, and fp32 in between: the exact result, rounded."""
    norm = build(torch.bfloat16, **settings)
    x = values(torch.bfloat16)
    exact = reference(norm, kind).float()(x.float())
    out = norm(x)
    assert out.dtype is torch.bfloat16
    torch.testing.assert_close(out, exact.to(torch.bfloat16), atol=0, rtol=2**-8)
    assert torch.equal(norm(x.float()), exact.to(torch.bfloat16))  # an fp32 residual stream


def test_starts_as_plain_normalisation():
    for settings in ({}, {"layernorm_zero_centered_gamma": True}):
        norm = build(**settings)
        norm.reset_parameters()
        x = values()
        torch.testing.assert_close(norm(x), torch.nn.functional.rms_norm(x, (SIZE,), eps=EPS))


def test_marked_for_sequence_parallelism():
    """Otherwise each rank would keep a gradient of its part of the sequence only."""
    parallel = {"sequence_parallel": True, "tensor_model_parallel_size": 2}
    for settings, marked in ((parallel, True), ({}, False)):
        norm = build(normalization="LayerNorm", **settings)
        assert isinstance(norm, LayerNorm)
        assert [p.sequence_parallel for p in norm.parameters()] == [marked, marked]
    assert isinstance(build(), RMSNorm)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("settings", "kind"), CASES)
def test_on_cuda(settings, kind, dtype):
    norm = build(dtype, **settings)
    x = values(dtype)
    expected = reference(norm, kind).float()(x.float())
    actual = norm.cuda()(x.cuda()).float().cpu()
    tolerance = 1e-5 if dtype is torch.float32 else 2**-7
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)
