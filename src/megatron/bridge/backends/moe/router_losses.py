# SPDX-License-Identifier: Apache-2.0
"""Router losses over the tokens that are no padding, each with the same weight.

Megatron-Core takes a ``padding_mask`` for this, with four exceptions: it multiplies a loss by the tokens of one
rank (unequal where padding is), takes the mean length for all sequences of ``seq_aux_loss``, adds one dimension
too few for the expert bias, and cuts the mask for sequence parallelism on the first pipeline stage only. Here the
total loss of a step is, for each router loss,

    coefficient * sum(tokens of a microbatch * its loss) / tokens of the step

With ``calculate_per_token_loss`` the gradients are divided by the tokens *in the loss*; the schedule multiplies the
gradient of router losses by their share of all tokens (``training/step/router_scale.py``).
"""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionLayer,
    roll_tensor,
)
from torch import Tensor

_core_forward = TopKRouter.forward
_core_get_embeddings = MultiTokenPredictionLayer._get_embeddings


def install_router_losses() -> None:
    """Replace the losses and statistics of Megatron-Core's routers; safe to call again."""
    router: Any = TopKRouter
    router.forward = _route_tokens
    router.apply_z_loss = _apply_z_loss
    router._apply_aux_loss = _apply_aux_loss
    router._apply_seq_aux_loss = _apply_seq_aux_loss
    router._apply_global_aux_loss = _apply_global_aux_loss
    router._apply_expert_bias = _apply_expert_bias
    prediction: Any = MultiTokenPredictionLayer
    prediction._get_embeddings = _get_embeddings


def _route_tokens(self: Any, input: Tensor, padding_mask: Tensor | None = None) -> Any:
    """Choose the experts of ``input`` [s, b, hidden]; ``padding_mask`` is [s, b] of this rank, or of the sequence."""
    if self.routing_type == "quantile_balancing":  # has quantiles over all rows of a microbatch
        padding_mask = None
    if padding_mask is not None and len(padding_mask) != len(input):
        padding_mask = padding_mask.chunk(self.tp_group.size())[self.tp_group.rank()]
    return _core_forward(self, input, padding_mask)


def _apply_expert_bias(self: Any, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
    """Count the tokens of each expert; not in evaluations and not in the first pass of recomputed layers."""
    if not self.enable_expert_bias or not torch.is_grad_enabled():
        return
    with torch.no_grad():
        if padding_mask is not None:
            routing_map = routing_map & ~padding_mask.unsqueeze(-1)
        self.local_tokens_per_expert += routing_map.sum(dim=0)


def _apply_z_loss(self: Any, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
    """Attach the squared log-sum-exp of ``logits`` [tokens, experts], averaged over real tokens."""
    coefficient = self.config.moe_z_loss_coeff
    if coefficient is None or not self.training or not torch.is_grad_enabled():
        return logits
    squares = torch.logsumexp(logits, dim=-1).square()
    if padding_mask is None:
        tokens = squares.new_full((), len(squares), dtype=torch.float32)
    else:
        squares = squares * ~padding_mask
        tokens = (~padding_mask).sum().float()
    all_tokens = _sum_over(tokens, self.tp_cp_group)
    mean = squares.sum() / all_tokens.clamp(min=1)
    return _attach_loss(self, logits, mean, coefficient, "z_loss", (tokens, all_tokens))


def _apply_aux_loss(
    self: Any,
    probs: Tensor,
    scores_for_aux_loss: Tensor,
    routing_map: Tensor,
    with_padding_mask: bool = False,
) -> Tensor:
    """Attach the load-balancing loss over the real tokens of the microbatch."""
    coefficient = self.get_aux_loss_coeff("aux_loss")
    if coefficient == 0:
        return probs
    counts, tokens, all_tokens = _count_tokens(self, routing_map, self.tp_cp_group)
    loss = _balancing_loss(self, scores_for_aux_loss, counts, all_tokens)
    name = "load_balancing_loss"
    return _attach_loss(self, probs, loss, coefficient, name, (tokens, all_tokens))


def _apply_global_aux_loss(
    self: Any,
    probs: Tensor,
    scores_for_aux_loss: Tensor,
    routing_map: Tensor,
    with_padding_mask: bool = False,
) -> Tensor:
    """Attach the load-balancing loss with the frequencies of all replicas and of earlier microbatches of the step."""
    coefficient = self.get_aux_loss_coeff("global_aux_loss")
    if coefficient == 0:
        return probs
    counts, tokens, all_tokens = _count_tokens(self, routing_map, self.tp_dp_cp_group)
    self.global_tokens_per_expert += counts
    self.ga_steps += all_tokens  # tokens rather than steps: microbatches differ in tokens
    frequencies = self.global_tokens_per_expert / self.ga_steps.clamp(min=1)
    loss = _balancing_loss(self, scores_for_aux_loss, frequencies * all_tokens, all_tokens)
    name = "global_load_balancing_loss"
    return _attach_loss(self, probs, loss, coefficient, name, (tokens, all_tokens))


def _apply_seq_aux_loss(
    self: Any,
    probs: Tensor,
    scores_for_aux_loss: Tensor,
    routing_map: Tensor,
    seq_length: int,
    bsz: int,
    with_padding_mask: bool = False,
) -> Tensor:
    """Attach the load-balancing loss of each row of the microbatch, weighted by its real tokens."""
    coefficient = self.get_aux_loss_coeff("seq_aux_loss")
    if coefficient == 0:
        return probs
    shape = (seq_length, bsz, self.config.num_moe_experts)
    local_counts = routing_map.view(shape).sum(0)
    counts = _sum_over(local_counts, self.tp_cp_group)
    row_tokens = (counts.sum(-1) / self.topk).clamp(min=1)  # [b]
    sums = scores_for_aux_loss.view(shape).sum(0)
    row_losses = (sums * counts).sum(-1) * self.num_experts / (self.topk * row_tokens.square())
    tokens = local_counts.sum() / self.topk
    all_tokens = counts.sum() / self.topk
    loss = (row_losses * row_tokens).sum() / all_tokens.clamp(min=1)
    name = "seq_load_balancing_loss"
    return _attach_loss(self, probs, loss, coefficient, name, (tokens, all_tokens))


def _count_tokens(router: Any, routing_map: Tensor, group: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Count the tokens of each expert over ``group``, the tokens of this rank, and those of ``group``.

    ``routing_map`` [tokens, experts] is zero for padding.
    """
    local_counts = routing_map.sum(0)
    counts = _sum_over(local_counts, group)
    return counts, local_counts.sum() / router.topk, counts.sum() / router.topk


def _sum_over(values: Tensor, group: Any) -> Tensor:
    total = values.clone()
    if group.size() > 1:
        dist.all_reduce(total, group=group)
    return total


def _balancing_loss(router: Any, scores: Tensor, counts: Tensor, all_tokens: Tensor) -> Tensor:
    """Compute this rank's part of the load-balancing loss (https://arxiv.org/abs/2101.03961)."""
    return moe_utils.switch_load_balancing_loss_func(
        probs=scores,
        tokens_per_expert=counts,
        total_num_tokens=all_tokens.clamp(min=1),  # pyright: ignore[reportArgumentType]
        topk=router.topk,
        num_experts=router.config.num_moe_experts,
        moe_aux_loss_coeff=1.0,
        fused=router.config.moe_router_fusion,
    )


def _attach_loss(
    router: Any,
    activation: Tensor,
    loss: Tensor,
    coefficient: float,
    name: str,
    tokens: tuple[Tensor, Tensor],
) -> Tensor:
    """Add the gradient of a router loss to ``activation``, and record the loss.

    Args:
        router: The router.
        activation: Its output, through which the gradient flows.
        loss: This rank's part of the loss of the microbatch, without the coefficient; the sum over the ranks that
            share the microbatch is the loss.
        coefficient: The factor of the loss.
        name: The name of the loss in Megatron-Core's tracker.
        tokens: Real tokens of this rank, and of all ranks that share the microbatch.
    """
    config = router.config
    local_tokens, all_tokens = tokens
    _record_loss(router, name, loss.detach(), local_tokens, all_tokens)
    repeats = 1
    if router.is_mtp_layer and config.mtp_use_repeated_layer:
        repeats = config.mtp_num_layers or 1
    scaled = loss * (coefficient / repeats)
    if router.calculate_per_token_loss:
        scaled = scaled * all_tokens
    elif name == "global_load_balancing_loss":
        # the gradients are averaged over replicas, and each has only its part of this loss
        scaled = scaled * (router.tp_dp_cp_group.size() // router.tp_cp_group.size())
    return MoEAuxLossAutoScaler.apply(activation, scaled)  # pyright: ignore[reportReturnType]


def _record_loss(
    router: Any, name: str, loss: Tensor, local_tokens: Tensor, all_tokens: Tensor
) -> None:
    config = router.config
    layers = config.num_layers
    layer = router.layer_number
    if router.is_mtp_layer:
        layer += layers
    layers += config.mtp_num_layers or 0
    tracker: Any = get_moe_metrics_tracker()
    is_global = name == "global_load_balancing_loss"
    # for programs that read Megatron-Core's tracker: a mean of microbatches
    tracker.record(
        name,
        loss,
        layer,
        layers,
        reduce_group=router.tp_dp_cp_group if is_global else router.tp_cp_group,
        needs_dp_avg=not is_global,
    )
    tracker.record_weighted(name, loss * all_tokens, local_tokens, layer, layers)


def _get_embeddings(self: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Shift tokens for the next depth of multi-token prediction, and the mask of those that are no padding.

    Megatron-Core shifts the mask itself, which makes the last token of each sequence a real one, and which does not
    work if sequence parallelism has cut it.
    """
    mask = kwargs.pop("padding_mask", None)
    shifted = list(_core_get_embeddings(self, input_ids, *args, **kwargs))
    if mask is not None:
        if mask.shape != input_ids.shape:
            mask = gather_from_sequence_parallel_region(
                mask.t().to(torch.uint8).contiguous(), tensor_parallel_output_grad=False
            ).t()
        real, _ = roll_tensor(
            (mask == 0).to(input_ids.dtype),
            shifts=-1,
            dims=-1,
            cp_group=self.cp_group,
            packed_seq_params=kwargs.get("packed_seq_params"),
        )
        shifted[2] = real == 0
    return tuple(shifted)
