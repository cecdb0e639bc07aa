# SPDX-License-Identifier: Apache-2.0
"""Losses of multi-token prediction, normalized over full sequences and reported exactly.

Megatron-Core 0.19 divides by the tokens of one rank. With context parallelism, only one rank loses the last
tokens of a sequence, so ranks are weighted differently: with 32 tokens on 2 ranks the gradients were off by
1.5%. It logs a mean of the means of microbatches, which depends on the batch size.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import gpt_model
from megatron.core.transformer import multi_token_prediction
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler, roll_tensor
from megatron.core.transformer.transformer_config import TransformerConfig

_core_process_mtp_loss: Callable[..., torch.Tensor] = multi_token_prediction.process_mtp_loss
_collectors: list[dict[str, torch.Tensor]] = []


def install() -> None:
    """Replace the multi-token-prediction losses of Megatron-Core's ``GPTModel``."""
    gpt_model.process_mtp_loss = process_mtp_loss


def share_output_weight(model: gpt_model.GPTModel) -> None:
    """Drop the weight of the output layer if the last of several stages also holds the shared embedding.

    Megatron-Core 0.19 allocates it, computes with the embedding, and then cannot save the model.
    """
    if model.share_embeddings_and_output_weights and model.mtp_process and model.post_process:
        model.output_layer.weight = None


@contextmanager
def collect_losses() -> Iterator[dict[str, torch.Tensor]]:
    """Collect the sum and number of losses of each depth (a tensor of two) over this rank's forward passes."""
    totals: dict[str, torch.Tensor] = {}
    _collectors.append(totals)
    try:
        yield totals
    finally:
        _collectors.remove(totals)


def process_mtp_loss(
    hidden_states: torch.Tensor, labels: torch.Tensor | None, **options: Any
) -> torch.Tensor:
    """Attach the losses of multi-token prediction to the hidden states of the decoder.

    ``hidden_states`` are the decoder's, which are returned, followed by each depth's: [(1 + depths) x sequence, batch,
    hidden]. ``labels`` are the next tokens, [batch, sequence of this context-parallel rank]. Without labels the model
    returns logits, and Megatron-Core's own function runs with the ``options``.
    """
    if labels is None:
        return _core_process_mtp_loss(hidden_states=hidden_states, labels=None, **options)
    return _attach_losses(hidden_states, labels, **options)


def _attach_losses(
    hidden_states: torch.Tensor,
    labels: torch.Tensor,
    loss_mask: torch.Tensor | None,
    output_layer: Callable[..., Any],
    output_weight: torch.Tensor | None,
    runtime_gather_output: bool | None,
    compute_language_model_loss: Callable[..., torch.Tensor],
    config: TransformerConfig,
    cp_group: dist.ProcessGroup,
    packed_seq_params: Any,
    scale_logits_fn: Callable[[torch.Tensor], torch.Tensor] | None,
    **_: Any,
) -> torch.Tensor:
    depths = config.mtp_num_layers or 0
    roll: Callable[..., Any] = roll_tensor  # it returns None only for None
    main, *states = hidden_states.chunk(1 + depths)
    if config.mtp_detach_heads:
        weight: Any = output_layer.weight if output_weight is None else output_weight  # type: ignore[attr-defined]
        output_weight = weight.detach()

    def following(values: torch.Tensor) -> list[torch.Tensor]:
        """Yield the values for each depth, shifted by one more token per depth."""
        shifted = [values]
        for _ in states:
            rolled, _ = roll(shifted[-1], cp_group=cp_group, packed_seq_params=packed_seq_params)
            shifted.append(rolled)
        return shifted

    masks = following(
        torch.ones_like(labels, dtype=torch.float32) if loss_mask is None else loss_mask.float()
    )
    weights = _depth_weights(masks, config, cp_group)
    targets = following(labels)[1:]
    for depth, (state, target, mask) in enumerate(zip(states, targets, masks[1:], strict=True)):
        logits, _ = output_layer(
            state, weight=output_weight, runtime_gather_output=runtime_gather_output
        )
        logits = logits if scale_logits_fn is None else scale_logits_fn(logits)
        losses = mask * compute_language_model_loss(target, logits)
        main = MTPLossAutoScaler.apply(main, losses * weights[depth])
        _report_losses(f"mtp_{depth + 1} loss", losses, mask)
    return main


def _depth_weights(
    masks: list[torch.Tensor], config: TransformerConfig, cp_group: dist.ProcessGroup
) -> torch.Tensor:
    """Return the factor for each depth's loss relative to the loss of the next token.

    With ``calculate_per_token_loss``, the schedule and ``finalize_model_grads`` divide by the tokens of all ranks;
    otherwise by the number of microbatches and of context-parallel ranks.
    """
    counts = torch.stack([mask.sum() for mask in masks])
    if cp_group.size() > 1:
        dist.all_reduce(counts, group=cp_group)
    full_count = counts[0] if config.calculate_per_token_loss else cp_group.size()
    factor = (config.mtp_loss_scaling_factor or 0.0) / (len(masks) - 1)
    return factor * full_count / counts[1:].clamp(min=1)


def _report_losses(name: str, losses: torch.Tensor, mask: torch.Tensor) -> None:
    pair = torch.stack((losses.detach().sum(), mask.sum())).double()
    for totals in _collectors:
        totals[name] = totals[name] + pair if name in totals else pair
