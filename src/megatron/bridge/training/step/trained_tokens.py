# SPDX-License-Identifier: Apache-2.0
"""Logits and losses of trained tokens only. In most conversations, few of the tokens are trained."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron.bridge.checkpoint.model_io import unwrap
from megatron.bridge.data.finetuning.packing import cut_for_rank
from megatron.bridge.training.step.sequence_group import group_of_sequences
from megatron.bridge.utils.patching import patched


def cut_on_host(values: torch.Tensor, batch: dict[str, Any]) -> torch.Tensor:
    """The part [b, s] of this context-parallel rank of ``values`` of full sequences; both are on the host."""
    group = group_of_sequences(batch)
    if group.size() == 1:
        return values
    return values[:, cut_for_rank(bounds_on_host(batch), group.rank(), group.size())]


def bounds_on_host(batch: dict[str, Any]) -> np.ndarray:
    """Where the sequences of each row begin and end; ``batch`` is on the host."""
    return (
        batch["cu_seqlens"].numpy()
        if "cu_seqlens" in batch
        else np.array([0, batch["tokens"].shape[1]])
    )


WORTHWHILE = 0.9  # share of trained tokens above which logits of all tokens are computed


def trained_token_arguments(model: MegatronModule, batch: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments that make a ``GPTModel`` compute logits of trained tokens only; other losses are zero.

    The batch is the whole microbatch on the host; its ``loss_mask`` is 0 where a token is not trained.

    Returns:
        An empty dict if the model computes the logits of all tokens; see ``trained_places``.
    """
    places = trained_places(model, batch)
    if places is None:
        return {}
    return {"output_processor": _losses, "output_processor_context": places}


def trained_logit_arguments(places: Tensor) -> dict[str, Any]:
    """Keyword arguments that make a ``GPTModel`` return the logits [tokens, vocabulary shard] at ``places``."""
    return {"output_processor": _logits, "output_processor_context": places}


def trained_places(model: MegatronModule, batch: dict[str, Any]) -> Tensor | None:
    """The indices of trained tokens into the flattened [sequence, batch] of this rank, on its device.

    Returns:
        None if the model computes the logits of all tokens: more than ``WORTHWHILE`` of them are trained, the chunk
        is not the last stage or not a ``GPTModel``, logits need a fixed shape, or the batch is on a GPU.
    """
    bare: Any = unwrap(model)
    if (
        not isinstance(bare, GPTModel)
        or not bare.post_process
        or not _accepts_output_processor(type(bare))
    ):
        return None
    config = bare.config
    if config.cuda_graph_impl != "none" or config.defer_embedding_wgrad_compute:
        return None
    if config.sequence_parallel and type(bare.output_layer) is not ColumnParallelLinear:
        return None
    if batch["loss_mask"].device.type != "cpu":  # reading it would synchronize with the GPU
        return None
    mask = cut_on_host(batch["loss_mask"], batch)
    places = mask.t().flatten().nonzero().flatten()
    if len(places) > WORTHWHILE * mask.numel():
        return None
    if not len(
        places
    ):  # any two: the mask drops their losses. torch.compile would compile again for one
        places = torch.arange(min(2, mask.numel()), device=mask.device)
    device = next(bare.parameters()).device
    places = places.pin_memory() if device.type == "cuda" else places
    return places.to(device, non_blocking=True)


@cache
def _accepts_output_processor(kind: type[GPTModel]) -> bool:
    """Whether the forward method of a ``GPTModel``, or of a subclass, accepts ``output_processor``."""
    parameters = inspect.signature(kind.forward).parameters
    return "output_processor" in parameters or any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
    )


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
    """Losses [batch, sequence], zero except at the indices ``context`` into the flattened [sequence, batch]."""
    logits = _logits(
        hidden_states=hidden_states,
        output_layer=output_layer,
        output_weight=output_weight,
        context=context,
        scale_logits=scale_logits,
    )
    targets = labels.t().flatten().index_select(0, context)
    losses = compute_language_model_loss(targets.unsqueeze(0), logits.unsqueeze(1)).flatten()
    placed = losses.new_zeros(labels.numel()).index_copy(0, context, losses)
    return placed.view(labels.shape[::-1]).t().contiguous()


def _logits(
    *,
    hidden_states: Tensor,
    output_layer: Any,
    output_weight: Tensor | None,
    context: Tensor,
    scale_logits: Callable[[Tensor], Tensor],
    **_: Any,
) -> Tensor:
    """Logits [tokens, vocabulary shard] at the indices ``context`` into the flattened [sequence, batch]."""
    with _gathered(hidden_states, output_layer) as all_states:
        chosen = all_states.flatten(0, 1).index_select(0, context).unsqueeze(1)
        logits, _ = output_layer(chosen, weight=output_weight)
    return scale_logits(logits).squeeze(1)


@contextmanager
def _gathered(hidden_states: Tensor, output_layer: Any) -> Iterator[Tensor]:
    """Hidden states of all tokens; inside the context, the output layer does not gather them again."""
    if not getattr(output_layer, "sequence_parallel", False):
        yield hidden_states
        return
    with patched(output_layer, sequence_parallel=False):
        # the output layer sums the gradients of its ranks, so each takes its own part
        yield gather_from_sequence_parallel_region(
            hidden_states, tensor_parallel_output_grad=False, group=output_layer.tp_group
        )
