# SPDX-License-Identifier: Apache-2.0
"""Padding so that tensor parallelism can shard any model without changing the function that is trained.

Padding heads are zero and get zero gradients, so they stay zero. Rows of vocabulary padding are excluded from the
softmax: otherwise each would add exp(0) to the denominator, and the loss would depend on the parallel layout.
"""

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor, nn

from megatron.bridge.models.features.feature import LayerFeature


@dataclass
class HeadPaddingFields:
    make_query_groups_divisible_by: int = 1
    """Append groups of attention heads that are all zero until the number of groups divides by this, so that
    tensor parallelism fits a model whose heads do not split evenly. Such heads output zero and get zero gradients:
    the function that is trained is the same, and an export leaves them out."""


class PaddingFeature(LayerFeature):
    pricing = {"make_query_groups_divisible_by": "modules"}

    def change_model(self, model: nn.Module, config: Any) -> None:
        apply_padding(model, config)


def apply_padding(model: nn.Module, config: Any) -> None:
    """Make the padding of a built ``GPTModel`` have no effect."""
    _zero_padded_heads(model, config)
    _mask_padded_vocabulary(model, config)


def _true_here(total: int, local: int) -> int:
    """How many of this rank's ``local`` items are not padding: the first ``total`` over all tensor-parallel ranks."""
    return min(max(total - local * parallel_state.get_tensor_model_parallel_rank(), 0), local)


@torch.no_grad()
def _zero_padded_heads(model: nn.Module, config: Any) -> None:
    groups = config.padded_heads[1] // config.tensor_model_parallel_size
    true = _true_here(config.unpadded_heads[1], groups)
    if true == groups:
        return
    for module in model.modules():
        if isinstance(module, SelfAttention):
            qkv = module.linear_qkv
            projection = module.linear_proj
            for parameter, dim in ((qkv.weight, 0), (qkv.bias, 0), (projection.weight, 1)):
                if parameter is not None:
                    rows = parameter.shape[dim] // groups
                    parameter.narrow(dim, true * rows, (groups - true) * rows).zero_()


def _mask_padded_vocabulary(model: nn.Module, config: Any) -> None:
    local = config.padded_vocab_size // config.tensor_model_parallel_size
    true = _true_here(config.vocab_size, local)
    output = getattr(model, "output_layer", None)
    if output is None or config.padded_vocab_size == config.vocab_size:
        return

    def mask(module: nn.Module, inputs: Any, outputs: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        logits, bias = outputs
        is_gathered = logits.shape[-1] == config.padded_vocab_size  # gathered from all ranks
        # the lowest finite value: infinity would turn label smoothing into NaN
        logits[..., config.vocab_size if is_gathered else true :] = torch.finfo(logits.dtype).min
        return logits, bias

    output.register_forward_hook(mask)
