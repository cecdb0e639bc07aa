# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint holds, without the model it belongs to: names, shapes, values."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as torch_checkpoint
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron.bridge.checkpoint import loading, lock, model_io, paths, saving
from megatron.bridge.checkpoint.inplace_reader import InplaceReader
from megatron.bridge.checkpoint.loading import without_torch_warnings
from megatron.bridge.utils import distributed

LAYERS = ("decoder.layers.", "encoder.layers.")


@dataclass(frozen=True)
class StoredTensor:
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def list_tensors(directory: Path) -> dict[str, StoredTensor]:
    entries = loading.check_files(directory).state_dict_metadata.items()
    return {
        name: StoredTensor(name, tuple(entry.size), entry.properties.dtype)
        for name, entry in sorted(entries)
        if isinstance(entry, TensorStorageMetadata)
    }


def is_weight(name: str) -> bool:
    """Whether a name belongs to the model, not to the optimizer or the run."""
    return not name.startswith(model_io.BESIDE_WEIGHTS)


def read_tensors(
    directory: Path, tensors: Iterable[StoredTensor]
) -> Iterator[tuple[StoredTensor, torch.Tensor]]:
    """Read full tensors, one after another."""
    for tensor in tensors:
        state: dict[str, Any] = {
            tensor.name: torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        }
        try:
            with without_torch_warnings():
                torch_checkpoint.load(state, storage_reader=InplaceReader(directory), no_dist=True)
        except BaseException as error:
            raise loading.unreadable(error, directory) from error
        yield tensor, state[tensor.name]


def unstack_layers(
    name: str, value: torch.Tensor, layers: int | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Split a tensor of all layers into one per layer, which is how this package stores them.

    Megatron-LM stores ``decoder.layers.mlp.linear_fc1.weight`` of shape [layers, ...].

    Args:
        layers: Number of layers if the checkpoint stacks them, else None.
    """
    prefix = _stack_of(name)
    if prefix is None or layers is None:
        yield name, value
        return
    for index in range(layers):
        yield f"{prefix}{index}.{name.removeprefix(prefix)}", value[index]


def stacked_layers(tensors: dict[str, StoredTensor]) -> int | None:
    """The number of layers if the checkpoint stacks the tensors of all layers, else None."""
    sizes = {tensor.shape[0] for name, tensor in tensors.items() if _stack_of(name)}
    return sizes.pop() if len(sizes) == 1 else None


def _stack_of(name: str) -> str | None:
    """The prefix of a tensor that stacks all layers; None for any other tensor."""
    prefix = next((prefix for prefix in LAYERS if name.startswith(prefix)), None)
    return (
        prefix if prefix and not name.removeprefix(prefix).partition(".")[0].isdecimal() else None
    )


def convert_checkpoint(source: Path, root: Path, run_config: dict[str, Any] | None) -> Path:
    """Convert the weights of a checkpoint, for example of Megatron-LM, to the format of this package.

    Args:
        source: One iteration's directory.
        root: Where the new checkpoint appears as ``iter_XXXXXXX``.
        run_config: What ``run_config.yaml`` shall hold, its key ``model`` being the provider; None leaves it out.

    Returns:
        The directory that was published.
    """
    distributed.initialize(
        "gloo"
    )  # Megatron-Core asks for the rank even where there is one process
    stored_tensors = {
        name.removeprefix(model_io.NEMO_PREFIX): tensor
        for name, tensor in list_tensors(source).items()
        if is_weight(name)
    }
    layers = stacked_layers(stored_tensors)
    state: dict[str, Any] = {
        name: ShardedTensor.from_rank_offsets(name, value.contiguous())
        for tensor, full_tensor in read_tensors(source, stored_tensors.values())
        for name, value in unstack_layers(
            tensor.name.removeprefix(model_io.NEMO_PREFIX), full_tensor, layers
        )
    }
    state[model_io.CONTENT_METADATA] = dict(model_io.MODEL_METADATA)
    directory = paths.iteration_dir(root, 0)
    extra = None if run_config is None else model_io.extra_files(run_config)
    with lock.held(root):
        saving.save(state, directory, extra, published=lambda: paths.write_tracker(root, 0))
    return directory
