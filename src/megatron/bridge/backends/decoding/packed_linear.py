# SPDX-License-Identifier: Apache-2.0
"""Linear layers whose weights are stored as oneDNN multiplies with them, for CPUs.

A decoding step multiplies a few rows with every weight. PyTorch's own product of 8 rows in float32 took 37 ms for
all layers of a model of 135M parameters, the one with packed weights 15 ms (bf16: 13 and 8), on one core.
It gives a row the same bits for any number of rows that is a multiple of 8.
"""

from typing import Any

import torch
from torch import Tensor, nn

_DTYPES = (torch.float32, torch.bfloat16)


def can_pack(weight: Any) -> bool:
    """Whether this machine has packed products for ``weight``."""
    plain = type(weight) in (Tensor, nn.Parameter) and weight.device.type == "cpu" and weight.dtype in _DTYPES
    return plain and torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


class PackedWeight:
    """A weight [out, in] in oneDNN's own layout; numbers are copied once.

    Args:
        weight: the weight.
    """

    def __init__(self, weight: Tensor) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x @ weight.T + bias`` of [..., in]."""
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")

    def unpacked(self) -> Tensor:
        """The weight as it was."""
        return self._packed.to_dense()


class PackedForward:
    """Takes the place of ``_forward_impl`` of Megatron-Core's parallel linear layers.

    Args:
        weight: of the layer, or the embedding's that it shares.
    """

    def __init__(self, weight: Tensor) -> None:
        self.packed = PackedWeight(weight)

    def __call__(self, input: Tensor, weight: Tensor, bias: Tensor | None = None, **_: Any) -> Tensor:
        """Multiply; ``weight`` is the one that was packed."""
        return self.packed(input, bias)
