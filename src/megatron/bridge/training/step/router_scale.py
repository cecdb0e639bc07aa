# SPDX-License-Identifier: Apache-2.0
"""The scale of router losses where the gradients are divided by what is in the loss, not by all tokens.

With ``calculate_per_token_loss``, Megatron-Core divides the gradients of a step by the tokens (or pairs) in its loss.
A router loss is a mean over all tokens that are no padding. Routers give its sum over these, so its gradient has to be
multiplied by the ratio of both numbers, which is known only when all microbatches of the step are.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossAutoScaler
from megatron.core.utils import get_model_config

from megatron.bridge.training.state import BatchIterator, Run
from megatron.bridge.training.step.losses import has_router_losses
from megatron.bridge.utils.errors import UserError
from megatron.bridge.utils.patching import patched

Batch = dict[str, Any]


@contextmanager
def scaled_router_losses(
    run: Run, batches: list[BatchIterator], microbatches: int, returned: list[torch.Tensor]
) -> Iterator[list[BatchIterator]]:
    """Scale the gradients of router losses inside the context, and yield iterators over the same microbatches.

    Args:
        run: The run.
        batches: One iterator for each chunk of the model.
        microbatches: Microbatches of the step on this rank; they are read before the context is entered.
        returned: The list to which the schedule adds each ``num_tokens`` that the loss function returns.

    Raises:
        UserError: The loss function has returned another number than ``loss_mask`` tells.
    """
    model = run.config.model
    if not model.calculate_per_token_loss or not has_router_losses(model):
        yield batches
        return
    drawn = [next(batches[0]) for _ in range(microbatches)]
    if any("loss_mask" not in batch for batch in drawn):  # of a forward step with its own loss
        yield [iter(drawn), *batches[1:]]
        return
    counted = _counts(run, drawn)
    in_loss, real_tokens, positions = _sum_over_replicas(run, counted).unbind()
    config: Any = get_model_config(run.model[0])

    def router_scale() -> torch.Tensor:
        share = (in_loss / real_tokens.clamp(min=1)).view(1)
        return share if config.grad_scale_func is None else config.grad_scale_func(share)

    def set_indexer_scale(scale: torch.Tensor) -> None:
        # padding is not known to attention, so the loss of indexers is a mean over all positions
        DSAIndexerLossAutoScaler.set_loss_scale(scale * (in_loss / positions))

    with ExitStack() as contexts:
        contexts.enter_context(patched(config, moe_grad_scale_func=router_scale))
        if config.experimental_attention_variant == "dsa":
            name = "experimental_attention_variant_loss_scale_func"
            contexts.enter_context(patched(config, **{name: set_indexer_scale}))
        yield [iter(drawn), *batches[1:]]
    if returned and not returned[0].is_meta:  # a rehearsal of one rank computes no numbers
        _check_count(int(torch.stack(returned).sum()), int(counted[0]))


def _check_count(returned: int, in_masks: int) -> None:
    """Refuse a loss function that counts something else than what router losses are scaled by."""
    # ranks that share a sequence return the numbers of their parts
    if parallel_state.get_context_parallel_world_size() == 1 and returned != in_masks:
        raise UserError(
            f"the loss function returned num_tokens={returned} in a step whose loss_mask has {in_masks}, by which "
            "the losses of routers are scaled: change loss_mask in the dataset, or set model.moe_aux_loss_coeff=0 "
            "and model.moe_z_loss_coeff=null"
        )


def _counts(run: Run, batches: list[Batch]) -> torch.Tensor:
    """What is in the loss, tokens that are no padding, and positions of ``batches``, [3] in float64."""
    totals = torch.zeros(3, dtype=torch.float64, device="cpu")
    for batch in batches:
        totals[0] += _count_in_loss(run, batch)
        totals[1] += _count_real_tokens(batch)
        totals[2] += batch["tokens"].numel()
    return totals


def _sum_over_replicas(run: Run, counts: torch.Tensor) -> torch.Tensor:
    """The sums of ``counts`` [3] in fp32, always in the same tensor, from which a CUDA graph reads."""
    totals = counts.to(torch.cuda.current_device(), copy=True)
    # the group of gradients, for which communicators exist; ranks that share a sequence count all of it each
    replicas: Any = parallel_state.get_data_parallel_group(with_context_parallel=True)
    if replicas.size() > 1:
        dist.all_reduce(totals, group=replicas)
        totals /= parallel_state.get_context_parallel_world_size()
    if run.router_totals is None:
        run.router_totals = totals.float()
    return run.router_totals.copy_(totals)


def _count_in_loss(run: Run, batch: Batch) -> int:
    """What the loss function returns as ``num_tokens`` of all context-parallel ranks together."""
    model: Any = run.config.model
    head = getattr(model, "head", None)
    of_pairs = head == "embedding" or (head is not None and model.num_labels == 1)
    if run.config.grpo is not None:
        return len(batch["cu_seqlens"]) - 1
    if run.config.dpo is not None or of_pairs:
        return (len(batch["cu_seqlens"]) - 1) // 2
    return int(batch["loss_mask"].sum())


def _count_real_tokens(batch: Batch) -> int:
    padding = int(batch["padding_mask"].sum()) if "padding_mask" in batch else 0
    return batch["tokens"].numel() - padding
