# SPDX-License-Identifier: Apache-2.0
"""Linear layers for CPUs whose weights are stored in oneDNN's layout.

A decoding step multiplies a few rows with every weight. PyTorch's own product of 8 rows in float32 took 37 ms for
all layers of a model of 135M parameters, the one with packed weights 15 ms (bf16: 13 and 8), on one core.
It gives a row the same bits for any number of rows that is a multiple of 8, with AVX-512: with AVX2, oneDNN's kernel
computes the last two of 8 or 32 rows in another order, and has no bf16. Narrow float32 weights are an exception: oneDNN
does not block them, and adds up 8 rows with 1,024 or more columns in another order than 16.
"""

from typing import Any

import torch
from torch import Tensor, nn

_DTYPES = (torch.float32, torch.bfloat16)
_NARROW = 512  # columns of weights that oneDNN may leave unblocked


def can_pack(weight: Any) -> bool:
    """Return whether this machine has packed products for ``weight``."""
    plain = (
        type(weight) in (Tensor, nn.Parameter)
        and weight.device.type == "cpu"
        and weight.dtype in _DTYPES
    )
    same_bits = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    packs = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return plain and same_bits and packs


class PackedWeight:
    """A weight [out, in] in oneDNN's layout, copied once."""

    def __init__(self, weight: Tensor) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())
        self._doubles_rows = weight.shape[1] <= _NARROW and self._is_another_with_8_rows(weight)

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute ``x @ weight.T + bias`` for x [rows, ..., in]."""
        if self._doubles_rows and x.numel() == 8 * x.shape[-1]:
            return self._product(torch.cat([x, x]), bias)[: x.shape[0]]
        return self._product(x, bias)

    def _product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")

    def _is_another_with_8_rows(self, weight: Tensor) -> bool:
        x = torch.randn(16, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(
            weight.dtype
        )
        return not torch.equal(self._product(x)[:8], self._product(x[:8]))

    def unpacked(self) -> Tensor:
        return self._packed.to_dense()


class PackedLayer:
    """Replaces ``forward`` of a whole linear layer, whose autograd functions take 0.2 ms in each layer of a decoder."""

    def __init__(self, layer: Any, packed: PackedWeight) -> None:
        self._packed = packed
        self._layer = layer

    def __call__(self, x: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor | None]:
        """Return the product, and the bias if the caller adds it."""
        bias = self._layer.bias
        if self._layer.skip_bias_add:
            return self._packed(x), bias
        return self._packed(x, bias), None


class PackedForward:
    """Replaces ``_forward_impl`` of a sharded linear layer."""

    def __init__(self, packed: PackedWeight) -> None:
        self._packed = packed

    def __call__(
        self, input: Tensor, weight: Tensor, bias: Tensor | None = None, **_: Any
    ) -> Tensor:
        """Multiply with the packed weight; ``weight`` is its original."""
        return self._packed(input, bias)
