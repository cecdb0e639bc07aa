# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingTypeStubs=false
"""The losses of multi-token prediction, counted over whole sequences and reported exactly.

Megatron-Core 0.19 divides by the tokens of a rank. A sequence that is cut for context parallelism loses its last
tokens on one rank only, so they weigh differently there: with 32 tokens on 2 ranks the gradients were off by 1.5%.
What it keeps for logging is a mean of means of microbatches, which depends on the batch size.
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

_of_megatron_core: Callable[..., torch.Tensor] = multi_token_prediction.process_mtp_loss
_collectors: list[dict[str, torch.Tensor]] = []


def install() -> None:
    """Let Megatron-Core's ``GPTModel`` take these losses instead of its own."""
    gpt_model.process_mtp_loss = attach_losses


def share_output_weight(model: gpt_model.GPTModel) -> None:
    """Leave out the output layer's own weight where the last of several stages has the shared embedding, too.

    Megatron-Core 0.19 allocates it, computes with the embedding's, and refuses to save the model.
    """
    if model.share_embeddings_and_output_weights and model.mtp_process and model.post_process:
        model.output_layer.weight = None


@contextmanager
def collected() -> Iterator[dict[str, torch.Tensor]]:
    """Sum and number of the losses of each depth (a tensor of two), over this rank's forward passes within."""
    totals: dict[str, torch.Tensor] = {}
    _collectors.append(totals)
    try:
        yield totals
    finally:
        _collectors.remove(totals)


def attach_losses(hidden_states: torch.Tensor, labels: torch.Tensor | None, **others: Any) -> torch.Tensor:
    """Add the losses of further tokens to the backward pass of the decoder's hidden states.

    Args:
        hidden_states: Of the decoder and behind it of each depth, [(1 + depths) x sequence, batch, hidden].
        labels: The next tokens, [batch, sequence of this context-parallel rank]; None for a model that is asked
            for logits, of which Megatron-Core derives its own.
        **others: The other arguments of Megatron-Core's ``process_mtp_loss``.

    Returns:
        The decoder's hidden states, [sequence, batch, hidden].
    """
    if labels is None:
        return _of_megatron_core(hidden_states=hidden_states, labels=None, **others)
    return _attach(hidden_states, labels, **others)


def _attach(
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
    roll: Callable[..., Any] = roll_tensor  # its hints allow for None, which it gives back for None only
    main, *states = hidden_states.chunk(1 + depths)
    if config.mtp_detach_heads:
        weight: Any = output_layer.weight if output_weight is None else output_weight  # type: ignore[attr-defined]
        output_weight = weight.detach()

    def following(values: torch.Tensor) -> list[torch.Tensor]:
        """The values as each depth sees them: one token further each."""
        shifted = [values]
        for _ in states:
            rolled, _ = roll(shifted[-1], cp_group=cp_group, packed_seq_params=packed_seq_params)
            shifted.append(rolled)
        return shifted

    masks = following(torch.ones_like(labels, dtype=torch.float32) if loss_mask is None else loss_mask.float())
    weights = _weights(masks, config, cp_group)
    targets = following(labels)[1:]
    for depth, (state, target, mask) in enumerate(zip(states, targets, masks[1:], strict=True)):
        logits, _ = output_layer(state, weight=output_weight, runtime_gather_output=runtime_gather_output)
        logits = logits if scale_logits_fn is None else scale_logits_fn(logits)
        losses = mask * compute_language_model_loss(target, logits)
        main = MTPLossAutoScaler.apply(main, losses * weights[depth])
        _report(f"mtp_{depth + 1} loss", losses, mask)
    return main


def _weights(masks: list[torch.Tensor], config: TransformerConfig, cp_group: dist.ProcessGroup) -> torch.Tensor:
    """What a loss of each depth is multiplied by, so that a depth counts like the loss of the next token.

    The schedule and ``finalize_model_grads`` divide by the tokens of all with ``calculate_per_token_loss``, else
    by the number of microbatches and of ranks that share a sequence.
    """
    counts = torch.stack([mask.sum() for mask in masks])
    if cp_group.size() > 1:
        dist.all_reduce(counts, group=cp_group)
    whole = counts[0] if config.calculate_per_token_loss else cp_group.size()
    factor = (config.mtp_loss_scaling_factor or 0.0) / (len(masks) - 1)
    return factor * whole / counts[1:].clamp(min=1)


def _report(name: str, losses: torch.Tensor, mask: torch.Tensor) -> None:
    pair = torch.stack((losses.detach().sum(), mask.sum())).double()
    for totals in _collectors:
        totals[name] = totals[name] + pair if name in totals else pair
