# SPDX-License-Identifier: Apache-2.0
"""Attention with linear biases (Press et al. 2022, arXiv:2108.12409), as Falcon RW has it.

The score of a query and a key is (q k + s p) / sqrt(width), where s is the slope of the head and p the position of the
key. The position of the query would add the same number to all scores of a row, which a softmax does not see. The
bias only depends on the key, so it is one more feature of the key, and the query has a 1 there. All kernels, caches
and kinds of context parallelism compute it without knowing of it.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor, nn
from torch.nn import functional as F

from megatron.bridge.backends.specs.layer_features import with_torch_attention
from megatron.bridge.models.features.feature import LayerFeature, differing
from megatron.bridge.models.features.multipliers import key_positions

BIAS_FEATURES = 8
"""Features that are added to each key: fused kernels need a multiple of 8, of which the first is the bias."""

_UNSUPPORTED = {
    "position_embedding_type": "none",
    "multi_latent_attention": False,
    "qk_clip": False,
}


@dataclass
class ALiBiFields:
    alibi: bool = False
    """Attention scores grow linearly with the position of the key, with a slope for each head (ALiBi)."""


class ALiBiFeature(LayerFeature):
    switches = {"alibi": False}
    plain_layers_only = True
    pricing = {"alibi": "numbers"}

    def check(self, config: Any) -> Iterator[str]:
        if not config.alibi:
            return
        yield from differing(config, _UNSUPPORTED, "with alibi=True", with_remedy=True)
        groups = config.num_query_groups or config.num_attention_heads
        if groups != config.num_attention_heads:
            yield (
                f"num_query_groups={groups} is not supported with alibi=True, whose biases differ by head: set "
                f"model.num_query_groups={config.num_attention_heads}"
            )

    def change_layer_spec(
        self, spec: ModuleSpec, config: Any, layer_number: int | None, provider: BackendSpecProvider
    ) -> ModuleSpec:
        """Use the attention of the torch backend, which takes values that are narrower than keys."""
        return with_torch_attention(spec) if config.alibi else spec

    def change_model(self, model: nn.Module, config: Any) -> None:
        if not config.alibi:
            return
        device = next(model.parameters()).device
        slopes = alibi_slopes(config.unpadded_heads[0]).to(device)
        slopes = F.pad(slopes, (0, config.num_attention_heads - len(slopes)))
        for module in model.modules():
            if isinstance(module, SelfAttention):
                _add_biases(module, slopes)


def alibi_slopes(heads: int) -> Tensor:
    """Return the slope of each head, [heads], in fp32.

    A power of two n has the slopes 2^(-8/n), 2^(-16/n), ... Other numbers take those of the next lower power of two,
    and then every second one of the next higher.
    """
    lower = 2 ** math.floor(math.log2(heads))
    powers = torch.arange(1, 1 + lower, dtype=torch.int32)
    slopes = torch.pow(torch.tensor(2.0 ** (-8.0 / lower)), powers)
    every_second = torch.arange(1, 1 + 2 * (heads - lower), 2, dtype=torch.int32)
    slopes_between = torch.pow(torch.tensor(2.0 ** (-4.0 / lower)), every_second)
    return torch.cat((slopes, slopes_between))


def _add_biases(attention: SelfAttention, slopes: Tensor) -> None:
    """Add the features of the bias to queries and keys, before core attention."""
    core: Any = attention.core_attention
    context_group = attention.pg_collection.cp
    local_slopes = slopes.chunk(core.tp_group.size())[core.tp_group.rank()]
    core.register_buffer("alibi_slopes", local_slopes, persistent=False)
    core.extra_key_width = BIAS_FEATURES

    def widen_queries_and_keys(
        module: Any, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        query, key, *other_args = args
        packed = kwargs.get("packed_seq_params")
        positions = key_positions(module, key, packed, context_group)
        # in this precision and order, as the models were trained
        biases = positions[:, None] * module.alibi_slopes.bfloat16()
        biases = biases.to(key.dtype)
        if key.ndim == 4:
            biases = biases[:, None].expand(key.shape[:-1])
        key_features = F.pad(biases[..., None], (0, BIAS_FEATURES - 1))
        query_features = F.pad(query.new_ones(*query.shape[:-1], 1), (0, BIAS_FEATURES - 1))
        wide_query = torch.cat((query, query_features), dim=-1)
        wide_key = torch.cat((key, key_features), dim=-1)
        return (wide_query, wide_key, *other_args), kwargs

    core.register_forward_pre_hook(widen_queries_and_keys, with_kwargs=True)
