# SPDX-License-Identifier: Apache-2.0
"""Full tensors in the place of low-bit weights while a checkpoint is read, a few of them in memory at a time."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron.bridge.backends.low_bit.weight import LowBitWeight, attributes_of

_BATCH_BYTES = 1 << 30  # a read costs the same however little it reads


@dataclass
class StagedWeight:
    """A low-bit weight, and the tensor in its place. It is on the CPU, where untouched memory is not allocated."""

    weight: LowBitWeight
    full: nn.Parameter

    def take(self, values: Tensor) -> None:
        """Quantize ``values`` and free the full tensor."""
        self.weight.set_values(values)
        self.full.untyped_storage().resize_(0)


def has_low_bit(chunks: Sequence[nn.Module]) -> bool:
    """Return whether some parameters are in a low-bit format."""
    return any(
        isinstance(parameter, LowBitWeight) for chunk in chunks for parameter in chunk.parameters()
    )


@contextmanager
def in_full(chunks: Sequence[nn.Module]) -> Iterator[list[dict[str, StagedWeight]]]:
    """Put full tensors in the place of low-bit weights inside the context; yield them by name for each chunk."""
    held: list[tuple[nn.Module, str, nn.Parameter]] = []
    staged: list[dict[str, StagedWeight]] = []
    try:
        for chunk in chunks:
            of_chunk: dict[str, StagedWeight] = {}
            for path, module in chunk.named_modules():
                for key, parameter in list(module._parameters.items()):
                    if isinstance(parameter, LowBitWeight):
                        of_chunk[f"{path}.{key}"] = _stage(parameter)
                        module._parameters[key] = of_chunk[f"{path}.{key}"].full
                        held.append((module, key, parameter))
            staged.append(of_chunk)
        yield staged
    finally:
        for module, key, parameter in held:
            module._parameters[key] = parameter


def batches(
    staged: Mapping[str, Mapping[str, StagedWeight]],
) -> Iterator[tuple[str, list[str]]]:
    """Yield (key, names) of weights that are read together; names of a chunk by the chunk's key."""
    for key, of_chunk in staged.items():
        batch: list[str] = []
        size = 0
        for name, weight in of_chunk.items():
            batch.append(name)
            size += weight.full.nbytes
            if size >= _BATCH_BYTES:
                yield key, batch
                batch = []
                size = 0
        if batch:
            yield key, batch


def _stage(weight: nn.Parameter) -> StagedWeight:
    assert isinstance(weight, LowBitWeight)
    full = nn.Parameter(torch.empty(weight.shape, dtype=weight.dtype), requires_grad=False)
    vars(full).update(attributes_of(weight))
    return StagedWeight(weight, full)
