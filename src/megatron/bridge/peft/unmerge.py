# SPDX-License-Identifier: Apache-2.0
"""A merged model without its adapters again."""

import torch
from torch import nn

from megatron.bridge.peft import layers
from megatron.bridge.peft.base import bare_chunks
from megatron.bridge.utils.errors import UserError


@torch.no_grad()
def subtract(model: list[nn.Module]) -> None:
    """Turn the sign of all adapters of a model whose weights hold them already.

    What the model computes, and what an export with ``merge_adapter_weights`` writes, is then the base: exactly up
    to the rounding of the merged weights.

    Raises:
        UserError: DoRA replaced the lengths of the base's rows, which nothing remembers.
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
