# SPDX-License-Identifier: Apache-2.0
"""Logits and losses of the trained tokens only: of most conversations, they are a small part of all tokens."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron.bridge.checkpoint.model_io import unwrap

WORTHWHILE = 0.9  # share of trained tokens above which logits of all tokens are computed


def only_trained(model: MegatronModule, mask: Tensor) -> dict[str, Any]:
    """Arguments with which a ``GPTModel`` computes logits of trained tokens only; the losses of others are zero.

    Args:
        model: a chunk of a model, with its wrappers.
        mask: [batch, sequence] of this rank's tokens on the host, 0 where a token is not in the loss.

    Returns:
        Nothing if the model computes the logits of all tokens: most are trained, it is no last stage or no
        ``GPTModel``, or the shape of logits must be fixed.
    """
    bare: Any = unwrap(model)
    if not isinstance(bare, GPTModel) or not bare.post_process:
        return {}
    config = bare.config
    if config.cuda_graph_impl != "none" or config.defer_embedding_wgrad_compute:
        return {}
    if config.sequence_parallel and type(bare.output_layer) is not ColumnParallelLinear:
        return {}
    places = mask.t().flatten().nonzero().flatten()
    if len(places) > WORTHWHILE * mask.numel():
        return {}
    places = places if len(places) else places.new_zeros(1)  # this token's loss is masked
    device = next(bare.parameters()).device
    return {"output_processor": _losses, "output_processor_context": places.to(device, non_blocking=True)}


def _losses(
    *,
    hidden_states: Tensor,
    output_layer: Any,
    output_weight: Tensor | None,
    labels: Tensor,
    context: Tensor,
    compute_language_model_loss: Callable[[Tensor, Tensor], Tensor],
    scale_logits: Callable[[Tensor], Tensor],
    **_: Any,
) -> Tensor:
    """Losses [batch, sequence], zero but at the places in ``context``, which count along [sequence, batch]."""
    with _gathered(hidden_states, output_layer) as whole:
        chosen = whole.flatten(0, 1).index_select(0, context).unsqueeze(1)
        logits, _ = output_layer(chosen, weight=output_weight)
    targets = labels.t().flatten().index_select(0, context)
    losses = compute_language_model_loss(targets.unsqueeze(0), scale_logits(logits)).flatten()
    placed = losses.new_zeros(labels.numel()).index_copy(0, context, losses)
    return placed.view(labels.shape[::-1]).t().contiguous()


@contextmanager
def _gathered(hidden_states: Tensor, output_layer: Any) -> Iterator[Tensor]:
    """Hidden states of all tokens, which the output layer does not gather meanwhile."""
    if not getattr(output_layer, "sequence_parallel", False):
        yield hidden_states
        return
    output_layer.sequence_parallel = False
    try:  # the output layer sums the gradients of its ranks, so each takes its own part
        yield gather_from_sequence_parallel_region(
            hidden_states, tensor_parallel_output_grad=False, group=output_layer.tp_group
        )
    finally:
        output_layer.sequence_parallel = True
