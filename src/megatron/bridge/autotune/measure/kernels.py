# SPDX-License-Identifier: Apache-2.0
"""Measure single kernels on one device."""

import statistics
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from megatron.bridge.autotune.profile import Samples, Shape
from megatron.bridge.backends.hardware import speed


def product(shape: Shape, dtype: torch.dtype) -> float:
    tokens, rows, columns = shape
    x = _random_tensor(tokens, columns, dtype=dtype)
    weight = _random_tensor(rows, columns, dtype=dtype)
    return _time_median(lambda: functional.linear(x, weight))


def attention(length: int, heads: int, width: int, dtype: torch.dtype) -> dict[str, Samples]:
    """Time causal attention over a quarter, half and all of the length."""
    samples: dict[str, Samples] = {"forward": [], "backward": []}
    for tokens in sorted({max(16, length // 4), max(16, length // 2), length}):
        leaves = [
            _random_tensor(1, heads, tokens, width, dtype=dtype).requires_grad_() for _ in range(3)
        ]
        operations = 2.0 * heads * width * tokens * (tokens + 1)
        run = lambda leaves=leaves: functional.scaled_dot_product_attention(*leaves, is_causal=True)  # noqa: E731
        output = run()
        gradient = torch.ones_like(output)
        samples["forward"].append((operations, _time_median(run)))
        back = lambda output=output, gradient=gradient: output.backward(gradient, retain_graph=True)  # noqa: E731
        samples["backward"].append((2.5 * operations, _time_median(back)))
    return samples


def moved(dtype: torch.dtype) -> Samples:
    """Time a norm, which reads and writes each element."""
    samples: Samples = []
    for rows in (16, 128, 1024, 8192):
        data = _random_tensor(rows, 512, dtype=dtype)
        weight = _random_tensor(512, dtype=dtype)
        run = lambda data=data, weight=weight: functional.rms_norm(data, (512,), weight)  # noqa: E731
        samples.append((2.0 * data.nbytes, _time_median(run)))
    return samples


def _time_median(call: Callable[[], object]) -> float:
    return statistics.median(speed.seconds_of(call))


def _random_tensor(*sizes: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*sizes, device=speed.device()).to(dtype)
