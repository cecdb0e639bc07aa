# SPDX-License-Identifier: Apache-2.0
"""The parts of forward steps and data paths that other programs call."""

from collections.abc import Iterator
from typing import Any

import torch

from megatron.bridge.training.gpt_step import next_batch
from megatron.bridge.utils.errors import UserError

PACKED_KEYS = ("cu_seqlens", "max_seqlen")
"""Keys of a batch that describe the samples of packed rows."""

GPTBatch = tuple[
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor | None,
    torch.Tensor,
    dict[str, Any] | None,
]


def get_batch(
    data_iterator: Iterator[dict[str, Any]],
    cfg: Any = None,
    use_mtp: bool = False,
    *,
    pg_collection: Any = None,
    vp_stage: int | None = None,
) -> GPTBatch:
    """Return the next microbatch on this rank's device, cut for context parallelism.

    Every pipeline stage gets all tensors, so the other arguments have no effect.

    Args:
        data_iterator: The microbatches of this rank.
        cfg: The config of the run.
        use_mtp: Whether the model predicts several tokens.
        pg_collection: Megatron-Core's groups.
        vp_stage: Index of the chunk.

    Returns:
        Tokens, labels, loss mask, attention mask (None is causal), position ids, and for packed rows
        ``cu_seqlens`` and ``max_seqlen``, else None.
    """
    del cfg, use_mtp, pg_collection, vp_stage
    batch = next_batch(data_iterator)
    packed = {key: batch[key] for key in PACKED_KEYS if key in batch}
    return (
        batch["tokens"],
        batch["labels"],
        batch["loss_mask"],
        batch.get("attention_mask"),
        batch["position_ids"],
        packed or None,
    )


def prepare_finetuning_batch(
    data_iterator: Iterator[dict[str, Any]] | None,
    num_microbatches: int,
    default_seq_length: int,
    seq_key: str = "tokens",
) -> tuple[Iterator[dict[str, Any]] | None, int]:
    """Take one global batch, and return its microbatches and the length of its rows.

    Args:
        data_iterator: Global batches of this rank; None on ranks that read no data.
        num_microbatches: Number of equal parts.
        default_seq_length: The length if the batch has no ``seq_key``, or without data.
        seq_key: Key of a tensor [rows, length].
    """
    if data_iterator is None:
        return None, default_seq_length
    batch = next(data_iterator)
    rows = batch.get(seq_key)
    length = rows.size(1) if isinstance(rows, torch.Tensor) else default_seq_length
    return iter(split_batch_into_microbatches(batch, num_microbatches)), length


def split_batch_into_microbatches(
    batch: dict[str, Any], num_microbatches: int, enforce_divisible: bool = True
) -> list[dict[str, Any]]:
    """Split tensors, and lists with an item for each row, along rows; other values are shared.

    Args:
        batch: Tensors with rows as their first dimension, and other values.
        num_microbatches: Number of parts.
        enforce_divisible: Refuse a number of rows that cannot be split into equal parts.
    """
    tensors = [value for value in batch.values() if isinstance(value, torch.Tensor)]
    if not tensors:
        raise UserError("a batch without tensors cannot be split: give one with tokens")
    rows = len(tensors[0])
    if enforce_divisible and rows % num_microbatches:
        raise UserError(
            f"{rows} rows do not divide into num_microbatches={num_microbatches}: choose a divisor, or "
            "enforce_divisible=False"
        )
    parts = [indices.tolist() for indices in torch.arange(rows).tensor_split(num_microbatches)]
    return [
        {key: _select_rows(value, indices, rows) for key, value in batch.items()}
        for indices in parts
    ]


def _select_rows(value: Any, indices: list[int], rows: int) -> Any:
    if isinstance(value, torch.Tensor):
        return value[indices[0] : indices[-1] + 1] if indices else value[:0]
    if isinstance(value, list) and len(value) == rows:
        return [value[index] for index in indices]
    return value
