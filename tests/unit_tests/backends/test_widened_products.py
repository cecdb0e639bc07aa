# SPDX-License-Identifier: Apache-2.0
"""A processor without bf16 instructions computes bf16 products in fp32 and rounds them once.

A subprocess plays such a processor: the libraries read these variables when they are loaded.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megatron.bridge.backends.hardware import bf16
from megatron.bridge.utils.errors import UserError

AVX2 = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
}


def run_on_avx2(*functions: str, **variables: str) -> dict[str, object]:
    """Run functions of this module in a process without AVX-512, and return what each returns."""
    calls = ", ".join(f"{name!r}: tests.{name}()" for name in functions)
    code = f"import json, {__name__} as tests; print(json.dumps({{{calls}}}))"
    environment = {**os.environ, **AVX2, **variables}
    environment.pop(bf16.VARIABLE, None)
    environment.update(variables)
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def differing_products() -> list[str]:
    """Return the products whose results or gradients differ from rounded ones of fp32, with their numbers."""
    import megatron.core  # noqa: F401 - installs the kernels

    torch.manual_seed(0)
    return [name for name, (product, shapes) in PRODUCTS.items() if not _is_exact(product, shapes)]


def _is_exact(product: Callable[..., Tensor], shapes: list[tuple[int, ...]]) -> bool:
    narrow = [torch.randn(shape).bfloat16().requires_grad_() for shape in shapes]
    wide = [tensor.detach().float().requires_grad_() for tensor in narrow]
    output, expected = product(*narrow), product(*wide)
    gradient = torch.randn(output.shape).bfloat16()
    gradients = torch.autograd.grad(output, narrow, gradient)
    expected_gradients = torch.autograd.grad(expected, wide, gradient.float())
    pairs = zip((output, *gradients), (expected, *expected_gradients), strict=True)
    return all(torch.equal(result, exact.bfloat16()) for result, exact in pairs)


PRODUCTS: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "linear": (functional.linear, [(70, 300), (260, 300)]),
    "linear with bias": (functional.linear, [(7, 10, 300), (260, 300), (260,)]),
    "batches": (torch.matmul, [(2, 3, 70, 30), (2, 3, 30, 20)]),
    "batches and a sum": (torch.baddbmm, [(3, 70, 20), (3, 70, 30), (3, 30, 20)]),
    "vector": (torch.mv, [(60, 50), (50,)]),
    "convolution": (functional.conv2d, [(2, 3, 28, 28), (8, 3, 4, 4), (8,)]),
    "convolution of videos": (functional.conv3d, [(2, 3, 4, 8, 8), (8, 3, 2, 4, 4)]),
}


def differing_attention() -> list[str]:
    """Return what of causal attention with grouped queries differs from the fp32 kernel, rounded once."""
    import megatron.core  # noqa: F401 - installs the kernels

    torch.manual_seed(0)
    shapes = [(2, 4, 64, 16), (2, 4, 64, 16), (2, 4, 64, 16)]
    narrow = [torch.randn(shape).bfloat16().requires_grad_() for shape in shapes]
    wide = [tensor.detach().float() for tensor in narrow]
    output = functional.scaled_dot_product_attention(*narrow, is_causal=True)
    gradient = torch.randn(output.shape).bfloat16()
    gradients = torch.autograd.grad(output, narrow, gradient)
    aten = torch.ops.aten
    expected, log_sum = aten._scaled_dot_product_flash_attention_for_cpu(*wide, is_causal=True)
    rounded = expected.bfloat16()
    # the backward pass reads the output that was stored, which is rounded
    expected_gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient.float(), *wide, rounded.float(), log_sum, 0.0, True
    )
    names = ("output", "query", "key", "value")
    results, exact = (output, *gradients), (expected, *expected_gradients)
    return [
        name
        for name, result, wide_result in zip(names, results, exact, strict=True)
        if not torch.equal(result, wide_result.bfloat16())
    ]


def differing_targets() -> list[str]:
    """Return the products into given memory that differ from those into new memory."""
    import megatron.core  # noqa: F401 - installs the kernels

    a, b = torch.randn(4, 30).bfloat16(), torch.randn(30, 5).bfloat16()
    expected = a @ b
    rows = torch.zeros(8, 5).bfloat16()
    torch.mm(a, b, out=rows[2:6])
    added = torch.zeros(4, 5).bfloat16().addmm_(a, b)
    targets = {"out": rows[2:6], "in place": added}
    return [name for name, target in targets.items() if not torch.equal(target, expected)]


def decision() -> list[object]:
    """Return what this process decided."""
    chosen = bf16.choose_products()
    return [chosen.widened, chosen.reason]


def differing_fp32() -> list[str]:
    """Return the fp32 products that are other than before the kernels were installed."""
    a, b = torch.randn(70, 30), torch.randn(30, 20)
    before = a @ b
    import megatron.core  # noqa: F401 - installs the kernels

    return [] if torch.equal(a @ b, before) else ["mm"]


@pytest.mark.slow
def test_products_and_gradients_are_those_of_fp32_rounded_once():
    answers = run_on_avx2(
        "decision",
        "differing_fp32",
        "differing_products",
        "differing_attention",
        "differing_targets",
    )
    assert answers.pop("decision") == [True, "oneDNN has no bf16 products for this processor"]
    assert not any(answers.values()), answers


def test_a_variable_overrides_the_decision(monkeypatch):
    for choice, widened in (("widen", True), ("native", False)):
        monkeypatch.setenv(bf16.VARIABLE, choice)
        bf16.choose_products.cache_clear()
        assert bf16.choose_products().widened == widened
    monkeypatch.setenv(bf16.VARIABLE, "fast")
    bf16.choose_products.cache_clear()
    with pytest.raises(UserError, match=f"{bf16.VARIABLE}=fast.*native, widen"):
        bf16.choose_products()
    bf16.choose_products.cache_clear()
