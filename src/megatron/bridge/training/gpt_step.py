# SPDX-License-Identifier: Apache-2.0
"""The forward step of a decoder-only language model."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import get_batch_on_this_cp_rank, get_model_config

from megatron.bridge.backends.attention.block_mask import host_values, remember_on_host
from megatron.bridge.data.finetuning.packing import cut_for_rank
from megatron.bridge.training.state import BatchIterator, LossFunction
from megatron.bridge.training.step.sequence_group import group_of_sequences
from megatron.bridge.training.step.trained_tokens import trained_token_arguments
from megatron.bridge.utils.errors import UserError
from megatron.bridge.utils.optional_imports import lazy_names

LOSS_NAME = "lm loss"


def forward_step(
    data_iterator: BatchIterator, model: MegatronModule, *, all_tokens: bool = False
) -> tuple[torch.Tensor, LossFunction]:
    """Run one model chunk on the next microbatch.

    Every pipeline stage reads the batch: it is small compared with the activations, and all stages need its masks
    and the lengths of packed samples.

    Args:
        data_iterator: The microbatches of this rank.
        model: The chunk, with its wrappers.
        all_tokens: Compute the losses of tokens that are not trained, too, for your own loss function.

    Returns:
        The chunk's output (on the last stage the loss of each token, [micro_batch_size, sequence of this
        context-parallel rank], which may be zero for tokens that are not trained) and the function that computes
        the loss from it.
    """
    host = _host_batch(data_iterator)
    batch = cut_sequences(on_device(host))
    extra: dict[str, Any] = {} if all_tokens else trained_token_arguments(model, host)
    if get_model_config(model).mtp_num_layers:
        extra["loss_mask"] = batch["loss_mask"]
    if "cu_seqlens" in batch:
        extra["packed_seq_params"] = packed_parameters(batch)
    extra |= padding_arguments(batch, model)
    output = model(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        **extra,
    )
    return output, partial(masked_loss, batch["loss_mask"])


forward_step.takes_shared_samples = True  # type: ignore[attr-defined]


def next_batch(data_iterator: Iterator[dict[str, Any]]) -> dict[str, Any]:
    """The next microbatch on this rank's device; with context parallelism, this rank's part of each sequence.

    Raises:
        UserError: The batch has images.
    """
    return cut_sequences(on_device(_host_batch(data_iterator)))


def _host_batch(data_iterator: Iterator[dict[str, Any]]) -> dict[str, Any]:
    batch = dict(next(data_iterator))
    if batch.pop("media", None):
        raise UserError(
            "gpt_step and distillation train on text, and the batch has images: use --step-func vlm_step or "
            "megatron.bridge.training.vlm_step.forward_step, or remove the images"
        )
    return batch


def on_device(batch: dict[str, Any]) -> dict[str, Any]:
    """The tensors of ``batch`` on this rank's device."""
    device = torch.cuda.current_device()
    moved = {
        key: value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value
        for key, value in batch.items()
    }
    if "cu_seqlens" in batch:
        remember_on_host(moved["cu_seqlens"], batch["cu_seqlens"].tolist())
    return moved


def cut_sequences(batch: dict[str, Any]) -> dict[str, Any]:
    """With context parallelism, this rank's part of each sequence, which is the second dimension."""
    group = group_of_sequences(batch)
    if group.size() == 1:
        return batch
    if "cu_seqlens" in batch:
        return _shard_packed(batch, group.rank(), group.size())
    return get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=group)


def _shard_packed(batch: dict[str, Any], rank: int, size: int) -> dict[str, Any]:
    """This rank's part of each packed sample; ``cu_seqlens`` still describes the complete row."""
    indices = torch.from_numpy(cut_for_rank(np.array(host_values(batch["cu_seqlens"])), rank, size))
    indices = indices.to(batch["tokens"].device, non_blocking=True)
    not_sharded = ("attention_mask", "cu_seqlens", "max_seqlen", "cp_size", "microbatches")
    return {
        key: value if key in not_sharded else value.index_select(1, indices)
        for key, value in batch.items()
    }


def packed_parameters(batch: dict[str, Any]) -> PackedSeqParams:
    """The boundaries of the samples in a packed row, for Megatron-Core's layers.

    Padding after a sample counts as part of it: attention is causal, so no trained token attends to it.
    """
    bounds = batch["cu_seqlens"]
    longest = batch["max_seqlen"]
    # of this row alone; without it, layers take the context-parallel group of the run
    group: Any = group_of_sequences(batch) if batch.get("cp_size", 1) > 1 else None
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        cp_group=group,
    )


def padding_arguments(batch: dict[str, Any], model: MegatronModule) -> dict[str, Any]:
    """The argument that keeps padding out of the statistics and losses of routers, if ``model`` has any."""
    if "padding_mask" not in batch or not get_model_config(model).num_moe_experts:
        return {}
    return {"padding_mask": batch["padding_mask"]}


def masked_loss(
    loss_mask: torch.Tensor, token_losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """The sum of the unmasked token losses, and the number of unmasked tokens.

    Megatron-Core divides the sum: with ``calculate_per_token_loss`` by the tokens of the global batch, otherwise
    by the tokens of this microbatch and the number of microbatches.

    Returns:
        The sum, the number of tokens, and the report: both in one tensor (float64, because float32 cannot
        represent counts above 2**24 exactly).
    """
    mask = loss_mask.view(-1).float()
    total = torch.sum(token_losses.view(-1).float() * mask)
    tokens = mask.sum()
    report = torch.stack((total.detach(), tokens)).double()
    return total, tokens.to(torch.int), {LOSS_NAME: report}


# names that other programs import from here
__getattr__ = lazy_names(
    __name__,
    {
        "get_batch": "megatron.bridge.compat.batches:get_batch",
    },
)
