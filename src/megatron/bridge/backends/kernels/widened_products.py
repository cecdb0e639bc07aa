# SPDX-License-Identifier: Apache-2.0
"""bfloat16 products of a CPU without bf16 instructions: computed in float32, and rounded once.

PyTorch's kernels for matrix products, attention and convolutions are replaced in its dispatcher, so every caller gets
them: Megatron-Core's functions, autograd's gradients, transformers. Float32 products run the original kernels.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron.bridge.backends.hardware import bf16

_FUNCTIONAL = (
    *("mm", "bmm", "addmm", "baddbmm", "addmv"),
    *("convolution", "convolution_backward"),
    "_scaled_dot_product_flash_attention_for_cpu_backward",
)
_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
_WITH_OUT = ("mm", "bmm", "addmm", "baddbmm", "addmv")
_IN_PLACE = ("addmm", "baddbmm", "addmv")

_installed: list[torch.library.Library] = []


def install() -> None:
    """Replace the kernels, if this processor needs it; safe to call again."""
    if _installed or not bf16.choose_products().widened:
        return
    library = torch.library.Library("aten", "IMPL")
    _installed.append(library)
    original = {name: _find_kernel(name) for name in (*_FUNCTIONAL, _ATTENTION)}
    replaced = {name: _widening_kernel(original[name]) for name in _FUNCTIONAL}
    replaced[_ATTENTION] = _widening_attention(original[_ATTENTION])
    for name in _WITH_OUT:
        kernel = _find_kernel(f"{name}.out")
        replaced[f"{name}.out"] = _widening_into_out(kernel, replaced[name])
    for name in _IN_PLACE:
        replaced[f"{name}_"] = _widening_in_place(_find_kernel(f"{name}_"), replaced[name])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        for name, function in replaced.items():
            library.impl(name, function, "CPU", with_keyset=True)


def _find_kernel(name: str) -> Any:
    return torch.library.get_kernel(f"aten::{name}", "CPU")


def _widening_kernel(kernel: Any) -> Callable[..., Any]:
    """Return a kernel that computes in float32 and rounds each result."""

    def compute(keys: Any, *args: Any, **kwargs: Any) -> Any:
        if args[0].dtype is not torch.bfloat16:
            return kernel.call_boxed(keys, *args, **kwargs)
        results = kernel.call_boxed(keys, *_widen_tensors(args), **kwargs)
        if isinstance(results, Tensor):
            return results.bfloat16()
        return tuple(None if result is None else result.bfloat16() for result in results)

    return compute


def _widening_attention(kernel: Any) -> Callable[..., Any]:
    """Return a kernel of attention, whose second result, the log-sum-exp, stays in float32."""

    def attend(keys: Any, *args: Any, **kwargs: Any) -> Any:
        if args[0].dtype is not torch.bfloat16:
            return kernel.call_boxed(keys, *args, **kwargs)
        wide_kwargs = dict(zip(kwargs, _widen_tensors(tuple(kwargs.values())), strict=True))
        output, log_sum = kernel.call_boxed(keys, *_widen_tensors(args), **wide_kwargs)
        return output.bfloat16(), log_sum

    return attend


def _widening_into_out(kernel: Any, functional: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a kernel of the ``.out`` variant, which copies the result of ``functional`` into ``out``."""

    def compute_into(keys: Any, *args: Any, out: Tensor, **kwargs: Any) -> Tensor:
        if args[0].dtype is not torch.bfloat16:
            return kernel.call_boxed(keys, *args, out=out, **kwargs)
        result = functional(keys, *args, **kwargs)
        return out.resize_(result.shape).copy_(result)

    return compute_into


def _widening_in_place(kernel: Any, functional: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a kernel of the in-place variant, which copies the result of ``functional`` into its first tensor."""

    def compute_in_place(keys: Any, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if target.dtype is not torch.bfloat16:
            return kernel.call_boxed(keys, target, *args, **kwargs)
        return target.copy_(functional(keys, target, *args, **kwargs))

    return compute_in_place


def _widen_tensors(values: tuple[Any, ...]) -> list[Any]:
    """Return the values, with bfloat16 tensors in float32."""
    return [
        value.float() if isinstance(value, Tensor) and value.dtype is torch.bfloat16 else value
        for value in values
    ]
