# SPDX-License-Identifier: Apache-2.0
"""Linear layers that compute with weights and inputs of a low-bit format, for quantization-aware training.

Parameters keep their precision: optimizers update them, and checkpoints and exports hold them. A layer rounds them in
every forward pass. Gradients pass the rounding unchanged (the straight-through estimator, https://arxiv.org/abs/1308.3432).
Autograd does not keep rounded weights: the backward pass rounds again, with the magnitudes of the forward pass, so that
only the matrices of one layer are in memory twice.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from megatron.bridge.backends.low_bit.rounding import ROUNDINGS, Magnitudes, QATFormat

_SETTINGS = "rounded_products"  # attribute of a module: its ``RoundedProducts``


@dataclass(frozen=True)
class RoundedProducts:
    """How a linear layer rounds.

    Attributes:
        format_name: The format of its weights.
        size: Neighbors that share a scale; None is the format's default.
        weights: Names of its parameters that are rounded.
        with_inputs: Whether inputs are rounded as well, as engines do.
        split: The dimension of a weight that tensor-parallel ranks share, or None.
        group: The process group of these ranks.
        row_order: The rows in the order of the published matrices, [rows], where a block must not cross from one matrix
            to another; None if they are in that order.
    """

    format_name: QATFormat
    size: int | None
    weights: tuple[str, ...]
    with_inputs: bool
    split: int | None
    group: Any
    row_order: Tensor | None = None

    def round_weight(self, weight: Tensor, magnitudes: Magnitudes) -> Tensor:
        """Return a weight of the format; see ``magnitudes``."""
        rounding = ROUNDINGS[self.format_name]
        if self.row_order is None:
            return rounding.round(weight, magnitudes, self.size)
        order = self.row_order.to(weight.device)
        rounded = torch.empty_like(weight)
        rounded[order] = rounding.round(weight[order], magnitudes, self.size)
        return rounded

    def magnitudes(self, weight: Tensor) -> Magnitudes:
        """Return what the scales of this rank's part depend on; a collective, where a scale is for all parts."""
        rounding = ROUNDINGS[self.format_name]
        rows = weight if self.row_order is None else weight[self.row_order.to(weight.device)]
        of_rank = rounding.magnitudes(rows, self.size)
        of_blocks = of_rank.of_blocks
        if rounding.span == "row" and self.split == 1:
            of_blocks = self._largest_of_ranks(of_blocks)
        of_tensor = of_rank.of_tensor
        if rounding.has_tensor_scale and self.split is not None:
            of_tensor = self._largest_of_ranks(of_tensor)
        return Magnitudes(of_blocks, of_tensor)

    def round_inputs(self, inputs: Tensor) -> Tensor:
        """Return inputs [..., columns] as engines round them, each token with scales of its own."""
        rounding = ROUNDINGS[self.format_name]
        if not self.with_inputs or rounding.activations is None:
            return inputs
        columns = inputs.shape[-1]
        width = columns
        if rounding.span == "block":
            width = self.size or cast(int, rounding.size)
        padded = nn.functional.pad(inputs.detach().float(), (0, -columns % width))
        groups = padded.unflatten(-1, (-1, width))
        largest = groups.abs().amax(dim=-1, keepdim=True)
        if rounding.span != "block" and self.split == 1:
            largest = self._largest_of_ranks(largest)
        rounded = rounding.activations(groups, largest).flatten(-2)[..., :columns]
        return cast(Tensor, _PassGradients.apply(inputs, rounded.to(inputs.dtype)))

    def _largest_of_ranks(self, values: Tensor) -> Tensor:
        if self.group.size() > 1:
            values = values.contiguous()
            dist.all_reduce(values, dist.ReduceOp.MAX, group=self.group)
        return values


class _PassGradients(torch.autograd.Function):
    """Stands for a rounded tensor whose gradient is that of the tensor itself."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, rounded: Tensor) -> Tensor:
        del ctx, tensor
        return rounded.view_as(rounded)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        del ctx
        return grad_outputs[0], None


def round_products(module: nn.Module, settings: RoundedProducts) -> None:
    """Let a linear layer compute with rounded weights and inputs from now on."""
    setattr(module, _SETTINGS, settings)
    # a bound method and not a closure, so that copies of the model use their own weights
    forward: Any = MethodType(_forward_rounded, module)
    module.forward = forward


def settings_of(module: nn.Module) -> RoundedProducts | None:
    """Return how a module rounds, or None if it does not."""
    return getattr(module, _SETTINGS, None)


@torch.no_grad()
def fix_rounded_weights(module: nn.Module) -> None:
    """Give all layers in ``module`` their rounded weights for good, for inference; inputs stay as they are."""
    for layer in module.modules():
        settings = settings_of(layer)
        if settings is None:
            continue
        for name in settings.weights:
            weight = layer.get_parameter(name)
            weight.copy_(settings.round_weight(weight, settings.magnitudes(weight)))
        delattr(layer, _SETTINGS)
        del layer.forward


def _forward_rounded(module: Any, inputs: Tensor, *args: Any, **options: Any) -> Any:
    settings: RoundedProducts = getattr(module, _SETTINGS)
    with _rounded_weights(module, settings):
        return type(module).forward(module, settings.round_inputs(inputs), *args, **options)


@contextmanager
def _rounded_weights(module: nn.Module, settings: RoundedProducts) -> Iterator[None]:
    """Put rounded weights in the place of parameters; autograd keeps the parameters."""
    parameters = {name: module.get_parameter(name) for name in settings.weights}
    saved = _SavedWeights(settings)
    registered = cast(dict[str, Any], module._parameters)
    try:
        for name, parameter in parameters.items():
            registered[name] = saved.rounded(parameter)
        with saved_tensors_hooks(saved.pack, saved.unpack):
            yield
    finally:
        registered.update(parameters)
        saved.forget_storages()  # autograd keeps ``pack``, and with it this object


@dataclass(frozen=True)
class _RoundAgain:
    """What autograd keeps for a rounded weight, or a view of it."""

    parameter: Tensor
    magnitudes: Magnitudes
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class _SavedWeights:
    """The rounded weights of a forward pass of a layer."""

    def __init__(self, settings: RoundedProducts) -> None:
        self._settings = settings
        self._of_storage: dict[int, tuple[Tensor, Magnitudes]] = {}

    def rounded(self, parameter: Tensor) -> Tensor:
        values = parameter.detach()
        magnitudes = self._settings.magnitudes(values)
        rounded = self._settings.round_weight(values, magnitudes)
        # the parameter itself: fully sharded parallelism frees its memory and gathers it again
        self._of_storage[_storage(rounded)] = (parameter, magnitudes)
        return cast(Tensor, _PassGradients.apply(parameter, rounded))

    def pack(self, tensor: Tensor) -> "Tensor | _RoundAgain":
        found = self._of_storage.get(_storage(tensor))
        if found is None:
            return tensor
        place = (tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))
        return _RoundAgain(*found, *place)

    def unpack(self, kept: "Tensor | _RoundAgain") -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        rounded = self._settings.round_weight(kept.parameter.detach(), kept.magnitudes)
        return rounded.as_strided(kept.size, kept.stride, kept.offset)

    def forget_storages(self) -> None:
        self._of_storage = {}


def _storage(tensor: Tensor) -> int:
    """Return the identity of a tensor's memory, which a tensor on the meta device has as well."""
    return tensor.untyped_storage()._cdata


def row_order_of_heads(rows: int, groups: int, width: int) -> Tensor:
    """Return the rows of a fused projection in the order queries, keys, values.

    Args:
        rows: Rows of this rank; those of a group of heads are its queries, its key and its value.
        groups: Groups of heads of this rank.
        width: Rows of a head.
    """
    indices = torch.arange(rows).view(groups, -1, width)
    parts = (indices[:, :-2], indices[:, -2], indices[:, -1])
    return torch.cat([part.flatten() for part in parts])
