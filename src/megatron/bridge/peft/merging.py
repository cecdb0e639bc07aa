# SPDX-License-Identifier: Apache-2.0
"""What a merge of adapters loses when the merged weights are rounded to their dtype."""

from collections.abc import Sequence

import torch
from torch import nn

from megatron.bridge.peft import layers
from megatron.bridge.peft.base import bare_chunks
from megatron.bridge.utils.errors import UserError


@torch.no_grad()
def rounding_loss(model: Sequence[nn.Module], dtype: torch.dtype | None = None) -> float:
    """The part of the adapters' effect on the weights that rounding removes.

    With W the weights and M the merged weights in fp32, it is ``|round(M) - M| / |M - W|``, with
    Frobenius norms over all adapted weights of this rank; 0 without adapters.

    Args:
        model: The chunks of the model.
        dtype: What the sums are rounded to; None is the dtype of each weight.
    """
    lost, effect = 0.0, 0.0
    for chunk in bare_chunks(model):
        for module in layers.adapted(chunk):
            weights = module.adapted_site.weights
            for weight, merged in zip(weights, module.adapter.merged_weights(weights), strict=True):
                lost += float((merged.to(dtype or weight.dtype).float() - merged).square().sum())
                effect += float((merged - weight.float()).square().sum())
    return (lost / effect) ** 0.5 if effect else 0.0


@torch.no_grad()
def subtract(model: list[nn.Module]) -> None:
    """Turn the sign of all adapters of a model whose weights hold them already.

    What the model computes, and what an export with ``merge_adapter_weights`` writes, is then the base: exactly up
    to the rounding of the merged weights.
    """
    for chunk in bare_chunks(model):
        for module in layers.adapted(chunk):
            for weight in module.adapted_site.weights:
                for part in module.low_rank_parts(weight):
                    if part.magnitude is not None:
                        raise UserError(
                            "DoRA cannot be taken out of a merged model, as the lengths of the base's rows are "
                            "lost: go back to the base itself"
                        )
                    part.b.neg_()
