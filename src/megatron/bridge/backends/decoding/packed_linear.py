# SPDX-License-Identifier: Apache-2.0
"""Linear layers for CPUs whose weights are stored as they are multiplied.

A decoding step multiplies a few rows with every weight. PyTorch's own product of 8 rows in float32 took 37 ms for
all layers of a model of 135M parameters, the one with packed weights 15 ms (bf16: 13 and 8), on one core.
A row has the same bits for any number of rows that is a multiple of 8.

With AVX-512, weights have oneDNN's layout. With AVX2, oneDNN's kernel computes the last two of 8 or 32 rows in
another order, and has no bf16: there, and for bf16 on all processors without bf16 instructions, a C kernel multiplies
panels of 16 features in float32. On one core it does 94 billion operations per second with 256 rows, as oneDNN does in
float32, and takes 1.6 ms for 8 rows of 2,048 x 2,048 weights in bf16 (oneDNN in float32: 2.3 ms).
"""

from typing import Any, Protocol

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor, nn

from megatron.bridge.backends.hardware import bf16
from megatron.bridge.backends.kernels import c_kernels

_DTYPES = (torch.float32, torch.bfloat16)
_NARROW = 512  # columns of weights that oneDNN may leave unblocked


class PackedWeight(Protocol):
    """A weight [out, in] in another layout, copied once."""

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute ``x @ weight.T + bias`` for x [rows, ..., in]."""
        ...

    def unpacked(self) -> Tensor:
        """Return the weight [out, in]."""
        ...


def can_pack(weight: Any) -> bool:
    """Return whether this machine has packed products for ``weight``."""
    plain = type(weight) in (Tensor, nn.Parameter) and weight.dim() == 2
    if not plain or weight.device.type != "cpu" or weight.dtype not in _DTYPES:
        return False
    return _uses_onednn(weight) or c_kernels.is_supported(weight)


def pack_weight(weight: Tensor) -> PackedWeight:
    """Pack a weight for which ``can_pack`` is true."""
    return OneDnnWeight(weight) if _uses_onednn(weight) else PanelWeight(weight)


def _uses_onednn(weight: Tensor) -> bool:
    """Return whether oneDNN's packed product has the same bits for any number of rows, and is fast."""
    if weight.dtype is torch.bfloat16 and bf16.choose_products().widened:
        return False
    same_bits = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    packs = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return same_bits and packs


class PanelWeight:
    """A weight as panels of features, for the C kernel."""

    def __init__(self, weight: Tensor) -> None:
        self._panels = c_kernels.pack_panels(weight)
        self._features = weight.size(0)

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute ``x @ weight.T + bias`` in float32, rounded once."""
        return c_kernels.multiply_panels(x, self._panels, bias, self._features)

    def unpacked(self) -> Tensor:
        # at the end of the interpreter, modules are gone already: only methods are called
        rows = self._panels.transpose(1, 2).flatten(0, 1)
        return rows[: self._features].contiguous()


class OneDnnWeight:
    """A weight in oneDNN's layout.

    oneDNN does not block narrow float32 weights, and adds up 8 rows with 1,024 or more columns in another order than
    16.
    """

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
    """Replaces ``forward`` of a linear layer, whose autograd functions take 0.2 ms in each layer of a decoder."""

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
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        sequence_parallel: bool = False,
        tp_group: Any = None,
        **_: Any,
    ) -> Tensor:
        """Multiply with the packed weight; ``weight`` is its original."""
        if sequence_parallel:
            input = gather_from_sequence_parallel_region(input, group=tp_group)
        return self._packed(input, bias)
