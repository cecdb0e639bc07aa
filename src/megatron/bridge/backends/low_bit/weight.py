# SPDX-License-Identifier: Apache-2.0
"""A frozen weight that is held in a low-bit format and computes as the matrix that it stands for.

Layers, adapters, conversions and checkpoints use it like any other parameter. Every operation gets the dequantized
matrix as a temporary tensor. Autograd keeps the codes, and the backward pass dequantizes them again: Megatron-Core's
linear layers and the grouped experts save the parameter itself.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from megatron.bridge.backends.low_bit.formats import LowBitFormat

_aten: Any = torch.ops.aten
_ALIASES = (_aten.detach.default, _aten.alias.default)
_PARTS = ("codes", "scales")
_OWN = ("low_bit_format", *_PARTS, "has_codes_of_source")


class LowBitWeight(Tensor):
    """A matrix [rows, columns] as codes and scales.

    Attributes:
        low_bit_format: What the codes mean.
        codes: [rows, columns / numbers of a code].
        scales: [rows, columns / group].
        has_codes_of_source: Whether the values are exactly those of a source that is published in this format.
    """

    low_bit_format: LowBitFormat
    codes: Tensor
    scales: Tensor
    has_codes_of_source: bool

    @staticmethod
    def __new__(
        cls: type["LowBitWeight"],
        low_bit_format: LowBitFormat,
        codes: Tensor,
        scales: Tensor,
        dtype: torch.dtype,
    ) -> "LowBitWeight":
        shape = (codes.shape[0], codes.shape[1] * low_bit_format.numbers_of_code)
        return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, shape, dtype=dtype, device=codes.device, requires_grad=False
        )

    def __init__(
        self, low_bit_format: LowBitFormat, codes: Tensor, scales: Tensor, dtype: torch.dtype
    ) -> None:
        del dtype
        self.low_bit_format = low_bit_format
        self.codes = codes
        self.scales = scales
        self.has_codes_of_source = False

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        del tensor_contents
        return f"LowBitWeight({self.low_bit_format.name}, {list(self.shape)}, {self.dtype})"

    @property
    def stored_bytes(self) -> int:
        """Bytes of the codes and scales."""
        return self.codes.nbytes + self.scales.nbytes

    def dequantized(self) -> Tensor:
        """Return the matrix in its dtype."""
        return self.low_bit_format.dequantize(self.codes, self.scales, self.dtype)

    @torch.no_grad()
    def set_values(self, matrix: Tensor) -> None:
        """Quantize ``matrix`` into this weight."""
        codes, scales = self.low_bit_format.quantize(matrix.to(self.device))
        self.set_codes(codes, scales)

    @torch.no_grad()
    def set_codes(self, codes: Tensor, scales: Tensor, of_source: bool = False) -> None:
        """Set codes and scales; ``of_source`` tells whether a published model has exactly these values."""
        self.codes.copy_(codes)
        self.scales.copy_(scales)
        self.has_codes_of_source = of_source

    # wrapped tensors, for torch's conversions of modules
    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return list(_PARTS), (self.low_bit_format, self.dtype)

    @staticmethod
    def __tensor_unflatten__(
        parts: Mapping[str, Tensor], about: Any, size: Any, stride: Any
    ) -> "LowBitWeight":
        del size, stride
        low_bit_format, dtype = about
        return LowBitWeight(low_bit_format, parts["codes"], parts["scales"], dtype)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is nn.functional.linear:
            return _linear(*args, **(kwargs or {}))
        del types
        with torch._C.DisableTorchFunctionSubclass():  # results are plain tensors
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, LowBitWeight):
            if func in _ALIASES:
                return first._with_parts(first.codes, first.scales, first.dtype)
            if func is _aten._to_copy.default and _only_moves(first, kwargs):
                device = kwargs["device"]
                return first._with_parts(
                    first.codes.to(device), first.scales.to(device), first.dtype
                )
            if func is _aten.copy_.default:
                first.set_values(_dequantize(args[1]))
                return first
        full_args, full_kwargs = tree_map(_dequantize, (tuple(args), kwargs))
        return func(*full_args, **full_kwargs)

    def _with_parts(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> "LowBitWeight":
        weight = LowBitWeight(self.low_bit_format, codes, scales, dtype)
        vars(weight).update(attributes_of(self))
        weight.has_codes_of_source = self.has_codes_of_source
        return weight


class _FrozenLinear(torch.autograd.Function):
    """``x @ weight.T + bias`` that keeps the codes of the weight for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        return nn.functional.linear(x, full_weight(weight), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        gradient = gradients[0]
        of_bias = gradient.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        return gradient @ full_weight(weight), None, of_bias


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    out = _FrozenLinear.apply(full_weight(x), weight, bias)
    assert isinstance(out, Tensor)
    return out


def full_weight(weight: Tensor) -> Tensor:
    """Return the matrix that a weight stands for; other tensors are returned unchanged."""
    return weight.dequantized() if isinstance(weight, LowBitWeight) else weight


def attributes_of(parameter: Tensor) -> dict[str, Any]:
    """Return what Megatron-Core notes on a parameter, such as how it is cut."""
    return {name: value for name, value in vars(parameter).items() if name not in _OWN}


def stored_bytes(tensor: Tensor) -> int:
    """Return the bytes that a tensor takes in memory."""
    return tensor.stored_bytes if isinstance(tensor, LowBitWeight) else tensor.nbytes


def empty_weight(
    low_bit_format: LowBitFormat, like: Tensor, device: torch.device | None = None
) -> LowBitWeight:
    """Return a weight of the shape and dtype of ``like`` that waits for its values.

    Args:
        low_bit_format: What the codes mean.
        like: The weight in full.
        device: Of the codes; None is that of ``like``.
    """
    rows, columns = like.shape
    device = device or like.device
    codes = torch.empty(
        low_bit_format.codes_shape(rows, columns),
        dtype=low_bit_format.codes_dtype,
        device=device,
    )
    scales = torch.empty(
        low_bit_format.scales_shape(rows, columns),
        dtype=low_bit_format.scales_dtype,
        device=device,
    )
    return LowBitWeight(low_bit_format, codes, scales, like.dtype)


def _dequantize(value: Any) -> Any:
    return value.dequantized() if isinstance(value, LowBitWeight) else value


def _only_moves(weight: Tensor, options: Mapping[str, Any]) -> bool:
    """Return whether a conversion changes the device and nothing else."""
    dtype = options.get("dtype")
    return options.get("device") is not None and dtype in (None, weight.dtype)
