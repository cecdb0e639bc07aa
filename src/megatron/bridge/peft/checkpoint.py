# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of adapters: the trained parameters, and the base weights that they belong to."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)
from torch import Tensor, nn

from megatron.bridge.backends.fsdp import sharded_rows
from megatron.bridge.checkpoint import loading, model_io, paths, verification
from megatron.bridge.checkpoint.collective import on_first_rank
from megatron.bridge.models.chunk_info import chunk_info
from megatron.bridge.models.conversion.adapters.adapted_layers import in_adapter
from megatron.bridge.models.conversion.auto_bridge import AutoBridge
from megatron.bridge.models.model_provider import PreWrapHook
from megatron.bridge.peft.base import PEFT, bare_chunks
from megatron.bridge.utils import distributed, unpickling
from megatron.bridge.utils.config.serialize import from_plain
from megatron.bridge.utils.errors import UserError

_MODULUS = 1 << 61
_MULTIPLIER = 0x9E3779B1  # odd, so that no position loses a bit


def trained_state(chunks: Sequence[nn.Module], metadata: dict[str, Any]) -> dict[str, Any]:
    """The sharded state of the trained parameters, sharing memory with them."""
    sharded_state = model_io.model_state(chunks, metadata)
    trained = {key: sorted(chunk_info(chunk).trained) for key, chunk in _keyed_chunks(chunks)}
    # with FSDP, this rank may have no rows of a parameter
    return {
        key: {name: sharded_state[key][name] for name in names if name in sharded_state[key]}
        for key, names in trained.items()
    }


def set_trained_state(chunks: Sequence[nn.Module], loaded: dict[str, Any]) -> None:
    """Copy the loaded values to the trained parameters."""
    for key, chunk in _keyed_chunks(chunks):
        in_place = sharded_rows.sharded_names(chunk)
        remaining = {name: value for name, value in loaded[key].items() if name not in in_place}
        outcome = chunk.load_state_dict(remaining, strict=False)
        missing = chunk_info(chunk).trained.intersection(outcome.missing_keys) - in_place
        assert not missing, f"not loaded after the checkpoint was read: {missing}"
        assert not outcome.unexpected_keys, f"loaded without a place: {outcome.unexpected_keys}"
        sharded_rows.update_compute_weights(chunk)


def saved_base(checkpoint: str | Path) -> tuple[Path, dict[str, str] | None]:
    """The directory of an iteration, and the name and fingerprint of the base model if it holds adapters."""
    directory = on_first_rank(lambda: paths.resolve(checkpoint))
    return directory, loading.load_common(directory).get("run", {}).get("base")


def load_adapters(
    chunks: list[Any],
    checkpoint: Path,
    check_base: bool = True,
    check_method: Callable[[PEFT], None] | None = None,
    bridge: AutoBridge | None = None,
) -> None:
    """Attach the adapters of a checkpoint to their base model and load them.

    Args:
        chunks: The base model.
        checkpoint: A run or one of its checkpoints.
        check_base: Refuse a base model on which the adapters were not trained.
        check_method: May refuse the method of the adapters before the model changes.
        bridge: Bridge of the base, whose weights are loaded again if the adapters need them in a low-bit format.
    """
    directory, base = saved_base(checkpoint)
    if base is None:
        raise UserError(
            f"checkpoint {directory} holds no adapters: use it as a model, or export its weights"
        )
    method = _saved_method(directory)
    if check_method is not None:
        check_method(method)
    bare = bare_chunks(chunks)
    if method.base_precision is not None and bridge is not None:
        method.lower_base(bare, is_loaded=False)
        bridge.load_hf_weights(bare)  # what is published in this format keeps its codes
    else:
        method.lower_base(bare)
    if check_base and fingerprint(chunks) != base["fingerprint"]:
        raise UserError(
            f"checkpoint {directory} holds adapters of {base['name']}, whose weights differ from those of the given "
            "model: use the base model on which the adapters were trained"
        )
    method(chunks, training=False)
    verification.verify(directory)
    state = trained_state(chunks, model_io.stored_metadata(loading.load_common(directory)))
    set_trained_state(chunks, loading.load(state, directory, known=model_io.BESIDE_WEIGHTS))


def _saved_method(directory: Path) -> PEFT:
    """Return the method of the adapters in a checkpoint."""
    method = from_plain(model_io.read_run_config(directory)["peft"], trust=unpickling.is_trusted())
    assert isinstance(method, PEFT), "a run with a base model has a PEFT method"
    return method


def _keyed_chunks(chunks: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    return zip(model_io.chunk_keys(chunks), bare_chunks(chunks), strict=True)


@torch.no_grad()
def fingerprint(chunks: Sequence[nn.Module]) -> str:
    """A 61-bit hash of the base weights in hexadecimal, the same under any layout.

    It is the sum of bits times position over all weights, so it does not depend on which rank holds which part.
    Weights are rounded to bf16 first, so precision does not matter. All ranks must call this.
    """
    total = sum(_shard_sum(shard) for shard in _hashed_shards(chunks)) % _MODULUS
    return f"{sum(distributed.all_gather_object(total)) % _MODULUS:016x}"


def _hashed_shards(chunks: Sequence[nn.Module]) -> Iterator[ShardedTensor]:
    """The shards that this rank hashes; each part of the model is hashed on one rank."""
    for key, state in model_io.model_state(chunks, model_io.MODEL_METADATA).items():
        del key
        for name, entry in state.items():
            if in_adapter(name):
                continue
            copy_ranges = entry.build() if isinstance(entry, ShardedTensorFactory) else entry
            for piece in nested_values([copy_ranges]):
                if isinstance(piece, ShardedTensor) and is_main_replica(piece.replica_id):
                    yield piece


def _shard_sum(shard: ShardedTensor) -> int:
    """The sum of one shard. Rows that pad a vocabulary are zero and add nothing."""
    assert shard.data is not None, f"{shard.key} has no data"
    bits = shard.data.to(torch.bfloat16).reshape(shard.data.shape).view(torch.int16).long() & 0xFFFF
    positions = _element_positions(shard, bits)
    name = sum(ord(letter) * 31**index for index, letter in enumerate(shard.key)) % _MODULUS
    # products are below 2^47, so sums of up to 2^16 of them cannot overflow
    products = (bits * positions).flatten()
    partial = products.split(1 << 16)
    return (sum(int(part.sum()) for part in partial) * (name | 1)) % _MODULUS


def _element_positions(shard: ShardedTensor, like: Tensor) -> Tensor:
    """A number of 31 bits for each element, by its place in the whole tensor."""
    positions = torch.zeros((), dtype=torch.long, device=like.device)
    for dim, size in enumerate(like.shape):
        index = (
            torch.arange(size, device=like.device)
            + shard.global_offset[shard.prepend_axis_num + dim]
        )
        shape = [size if axis_index == dim else 1 for axis_index in range(like.ndim)]
        positions = (positions * _MULTIPLIER + index.view(shape) + 1) & 0x7FFFFFFF
    for axis in range(shard.prepend_axis_num):
        positions = (positions * _MULTIPLIER + shard.global_offset[axis] + 1) & 0x7FFFFFFF
    return positions


HEAD_SETTINGS = ("head", "num_labels", "label_names")
"""Settings of a model that a run may have and its base model not."""


def base_name(path: Path) -> str | None:
    """The path or hub id of the base model on which the adapters were trained."""
    _, base = saved_base(path)
    return None if base is None else base["name"]


def adapted_model(
    path: Path, base: str, trust_remote_code: bool, check: bool
) -> tuple[AutoBridge, list[Any]]:
    """Load the base model, a directory or hub id, with the adapters of a checkpoint, in one process.

    ``check`` refuses a base model on which the adapters were not trained.
    """
    # the fingerprint proves the weights, so an adapter next to them does not count
    bridge = AutoBridge.from_hf_pretrained(
        base, trust_remote_code=trust_remote_code, adapter="none" if check else None
    )
    return bridge, load_adapted(bridge, path, check)


def load_adapted(bridge: AutoBridge, checkpoint: Path, check_base: bool = True) -> list[Any]:
    """Build the base model of ``bridge`` with the adapters of a checkpoint; see ``load_adapters``."""
    directory, base = saved_base(checkpoint)
    method = None if base is None else _saved_method(directory)
    provider = bridge.to_megatron_provider()
    if method is not None and method.base_precision is not None:
        provider = bridge.to_megatron_provider(load_weights=False)
        provider.backend = "torch"
        provider.register_pre_wrap_hook(_low_bit_loader(bridge, method))
    of_run = model_io.read_run_config(directory)["model"]
    for name in HEAD_SETTINGS:
        # a run can put a new head on a language model, whose first weights depend on nothing
        if of_run.get(name) is not None:
            setattr(provider, name, of_run[name])
    model = provider.provide_distributed_model(wrap_with_ddp=False)
    load_adapters(model, checkpoint, check_base)
    return model


def _low_bit_loader(bridge: AutoBridge, method: PEFT) -> PreWrapHook:
    """Return a hook that loads the base as in training: what is published in this format keeps its codes."""

    def load(chunks: list[Any]) -> None:
        method.lower_base(chunks, is_loaded=False)
        bridge.load_hf_weights(chunks)

    return PreWrapHook(load, fills_every_parameter=True)
