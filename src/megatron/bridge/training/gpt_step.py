# SPDX-License-Identifier: Apache-2.0
"""The forward step of a decoder-only language model."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import get_batch_on_this_cp_rank, get_model_config

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
    extra = {"loss_mask": batch["loss_mask"]} if get_model_config(model).mtp_num_layers else {}
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
    return get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=group) if group.size() > 1 else batch


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
