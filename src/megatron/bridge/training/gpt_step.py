# SPDX-License-Identifier: Apache-2.0
"""The forward step of a decoder-only language model."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import get_batch_on_this_cp_rank, get_model_config

from megatron.bridge.data.packing import cut_for_rank
from megatron.bridge.training.state import Batches, LossFunction

LOSS_NAME = "lm loss"


def forward_step(data_iterator: Batches, model: MegatronModule) -> tuple[torch.Tensor, LossFunction]:
    """Run one chunk of the model on the next microbatch.

    Every pipeline stage draws the batch: it is small beside the activations, and what describes it (masks, lengths
    of packed samples) is then at hand in all of them.

    Returns:
        The chunk's output (on the last stage the loss of each token, [micro_batch_size, sequence of this
        context-parallel rank]) and the function that makes a loss of it.
    """
    batch = next_batch(data_iterator)
    extra: dict[str, Any] = {"loss_mask": batch["loss_mask"]} if get_model_config(model).mtp_num_layers else {}
    if "cu_seqlens" in batch:
        extra["packed_seq_params"] = packed_parameters(batch)
    output = model(
        batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"], **extra
    )
    return output, partial(masked_loss, batch["loss_mask"])


def next_batch(data_iterator: Iterator[dict[str, Any]]) -> dict[str, Any]:
    """The next microbatch on this rank's device; under context parallelism, this rank's part of each sequence."""
    device = torch.cuda.current_device()
    batch = {
        key: value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value
        for key, value in next(data_iterator).items()
    }
    group: Any = parallel_state.get_context_parallel_group()
    if group.size() == 1:
        return batch
    if "cu_seqlens" in batch:
        return _cut_packed(batch, group.rank(), group.size())
    return get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=group)


def _cut_packed(batch: dict[str, Any], rank: int, size: int) -> dict[str, Any]:
    """This rank's part of each sample of the row; the bounds remain those of the whole row."""
    places = torch.from_numpy(cut_for_rank(batch["cu_seqlens"].cpu().numpy(), rank, size))
    places = places.to(batch["tokens"].device)
    whole = ("attention_mask", "cu_seqlens", "max_seqlen")
    return {key: value if key in whole else value.index_select(1, places) for key, value in batch.items()}


def packed_parameters(batch: dict[str, Any]) -> PackedSeqParams:
    """Where the samples of a packed row begin and end, as Megatron-Core's layers take it.

    Padding behind a sample counts as a part of it: attention is causal, so no learnt token sees it.
    """
    bounds, longest = batch["cu_seqlens"], batch["max_seqlen"]
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def masked_loss(
    loss_mask: torch.Tensor, token_losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """The sum of the losses that count, and their number.

    Megatron-Core divides: by the tokens of the global batch with ``calculate_per_token_loss``, else by those of
    this microbatch and the number of microbatches.

    Returns:
        Sum, number of tokens, and for reporting both as one tensor of two (float64: a count above 2**24 is not
        exact in float32).
    """
    mask = loss_mask.view(-1).float()
    total = torch.sum(token_losses.view(-1).float() * mask)
    tokens = mask.sum()
    report = torch.stack((total.detach(), tokens)).double()
    return total, tokens.to(torch.int), {LOSS_NAME: report}
