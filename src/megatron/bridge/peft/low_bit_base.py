# SPDX-License-Identifier: Apache-2.0
"""The frozen base of a PEFT method in a low-bit format (https://arxiv.org/abs/2305.14314)."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron.bridge.backends.cpu.device import has_cuda
from megatron.bridge.backends.low_bit.formats import FORMATS, LowBitFormat
from megatron.bridge.backends.low_bit.matrices import is_matrix
from megatron.bridge.backends.low_bit.weight import LowBitWeight, attributes_of, empty_weight
from megatron.bridge.models.conversion.adapters.adapted_layers import in_adapter
from megatron.bridge.models.conversion.engine import exchange
from megatron.bridge.models.conversion.engine.plan import global_name
from megatron.bridge.peft import targets
from megatron.bridge.peft.targets import TargetCandidate
from megatron.bridge.utils.errors import UserError


@dataclass(frozen=True)
class BaseWeight:
    """A parameter of the base that can be held in a low-bit format."""

    name: str  # in the full model
    key: str  # in its module
    module: nn.Module
    parameter: nn.Parameter

    @property
    def layer(self) -> str:
        """The name of the module in the full model."""
        return self.name.rpartition(".")[0]


def set_precision(
    chunks: Sequence[nn.Module],
    base_precision: str,
    keep_high: Sequence[str] = (),
    trained: Collection[int] = (),
    is_loaded: bool = True,
) -> None:
    """Hold the matrices of attention, MLPs and experts in a low-bit format, one after another.

    Args:
        chunks: All chunks of this rank, bare; all ranks of a replica call this.
        base_precision: Name of the format.
        keep_high: Names or patterns of layers that stay as they are.
        trained: Ids of parameters that are trained, and so stay as they are.
        is_loaded: Whether the parameters have their values, which are quantized; else they wait for them.
    """
    low_bit_format = FORMATS[base_precision]
    all_weights = [weight for chunk in chunks for weight in base_weights(chunk)]
    in_full = _layers_in_full(all_weights, keep_high)
    weights = [
        weight
        for weight in all_weights
        if id(weight.parameter) not in trained and weight.layer not in in_full
    ]
    problems = [problem for weight in weights if (problem := _problem(weight, low_bit_format))]
    everywhere = [problem for stage in exchange.all_gather_stages(problems) for problem in stage]
    if everywhere:
        raise UserError(everywhere[0])
    for weight in weights:
        if not isinstance(weight.parameter, LowBitWeight):
            _replace(weight, low_bit_format, is_loaded)


def base_weights(chunk: nn.Module) -> Iterator[BaseWeight]:
    """Yield the matrices of a bare chunk that a low-bit format can hold."""
    for path, module in chunk.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            local_name = f"{path}.{key}"
            name = global_name(chunk, local_name)
            if is_matrix(name) and not in_adapter(name) and parameter.dim() == 2:
                yield BaseWeight(name, key, module, parameter)


def low_bit_weights(chunks: Sequence[nn.Module]) -> list[LowBitWeight]:
    """Return the parameters of some chunks that are in a low-bit format."""
    return [
        parameter
        for chunk in chunks
        for parameter in chunk.parameters()
        if isinstance(parameter, LowBitWeight)
    ]


def notes(chunks: Sequence[nn.Module]) -> list[str]:
    """Return a sentence about the low-bit weights of this rank, if there are any."""
    weights = low_bit_weights(chunks)
    if not weights:
        return []
    low_bit_format = weights[0].low_bit_format
    stored = sum(weight.stored_bytes for weight in weights)
    full = sum(weight.nbytes for weight in weights)
    kept = sum(weight.has_codes_of_source for weight in weights)
    of_source = f", {kept} of them exactly as the source has them" if kept else ""
    return [
        f"peft.base_precision={low_bit_format.name} holds {len(weights)} matrices of this rank in "
        f"{stored / 1e6:,.1f} MB instead of {full / 1e6:,.1f} MB{of_source}"
    ]


@torch.no_grad()
def restore(chunks: Sequence[nn.Module]) -> None:
    """Put plain parameters with the same values in the place of all low-bit weights, as inference needs them."""
    for chunk in chunks:
        for module in chunk.modules():
            for parameter in list(module.parameters(recurse=False)):
                if isinstance(parameter, LowBitWeight):
                    replace_with_full(module, parameter, parameter.dequantized())


def replace_with_full(module: nn.Module, parameter: Tensor, values: Tensor) -> None:
    """Put a plain parameter in the place of a low-bit weight of a module.

    Args:
        module: The layer that owns ``parameter``.
        parameter: The low-bit weight.
        values: Its new values, of the same shape.
    """
    for key, candidate in list(module.named_parameters(recurse=False)):
        if candidate is parameter:
            full = nn.Parameter(values.to(parameter.dtype), requires_grad=False)
            vars(full).update(attributes_of(candidate))
            setattr(module, key, full)


def _layers_in_full(weights: Sequence[BaseWeight], keep_high: Sequence[str]) -> set[str]:
    """Return the layers that patterns keep in full; refuse a pattern that selects none."""
    layers = dict.fromkeys(weight.layer for weight in weights)
    candidates = targets.gather([TargetCandidate(name, name) for name in layers])
    selected = targets.select("peft.base_keep_high", keep_high, candidates)
    return {name for names in selected.values() for name in names}


def _problem(weight: BaseWeight, low_bit_format: LowBitFormat) -> str | None:
    lineage = {cls.__name__ for cls in type(weight.module).__mro__}
    if any(name.startswith("TE") for name in lineage):
        return (
            f"peft.base_precision={low_bit_format.name} is for layers of PyTorch, and {weight.name} is of Transformer "
            "Engine: set model.backend=torch"
        )
    columns = weight.parameter.shape[1]
    if columns % low_bit_format.group:
        return (
            f"peft.base_precision={low_bit_format.name} has groups of {low_bit_format.group} numbers in a row, and "
            f"{weight.name} has {columns} columns on each rank: use another precision (mxfp4 has groups of 32), "
            "fewer tensor-parallel ranks, or leave it out"
        )
    return None


@torch.no_grad()
def _replace(weight: BaseWeight, low_bit_format: LowBitFormat, is_loaded: bool) -> None:
    device = weight.parameter.device
    if not is_loaded and device.type == "cpu" and has_cuda():
        device = torch.device("cuda", torch.cuda.current_device())
    low_bit = empty_weight(low_bit_format, weight.parameter, device)
    if is_loaded and not weight.parameter.is_meta:
        low_bit.set_values(weight.parameter)
    parameter = nn.Parameter(low_bit, requires_grad=False)
    vars(parameter).update(attributes_of(weight.parameter))
    setattr(weight.module, weight.key, parameter)
