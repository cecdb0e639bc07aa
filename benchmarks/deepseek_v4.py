# SPDX-License-Identifier: Apache-2.0
"""The layers of DeepSeek-V4 as the numbers that a prediction reads, from transformers' class.

Its default sizes are those of Flash. This package has no such layers yet. Attention sees a window, and compressed
tokens: one of 4 in the layers in which an indexer selects some, one of 128 in the others, of which all are seen. The
residual stream is ``hc_mult`` streams wide. Layers of one kind are equal.
"""

from typing import Any

import torch
from torch import nn
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4DecoderLayer,
    DeepseekV4HyperConnection,
)

from megatron.bridge.autotune.search.price import CountedLayers
from megatron.bridge.autotune.time.work import LayerShape, Matrix

_SPARSE = "compressed_sparse_attention"
_SCORED_AND_SUMMED = 4  # operations for each key and number of a head: a product with the query, and one with the value
_STREAMS_READ = 3
"""How often a hyper-connection reads or writes all streams: for its weights, to collapse and to mix them."""


def set_sizes(model: Any) -> None:
    """Set the sizes of DeepSeek-V4 Flash that concern the full model, in the provider of another model with experts."""
    sizes = DeepseekV4Config()
    model.num_layers = sizes.num_hidden_layers
    model.hidden_size = sizes.hidden_size
    model.vocab_size = sizes.vocab_size
    model.num_moe_experts = sizes.n_routed_experts
    model.moe_router_topk = sizes.num_experts_per_tok
    model.moe_ffn_hidden_size = sizes.moe_intermediate_size


def count_layers(length: int) -> CountedLayers:
    """Return the layers on one rank, with a single expert each, for sequences of ``length`` tokens."""
    sizes = DeepseekV4Config()
    shapes = {
        kind: _shape_of(sizes, sizes.layer_types.index(kind), length)
        for kind in set(sizes.layer_types)
    }
    return CountedLayers(tuple((shapes[kind], None) for kind in sizes.layer_types), ())


def _shape_of(sizes: Any, index: int, length: int) -> LayerShape:
    with torch.device("meta"):
        layer = DeepseekV4DecoderLayer(sizes, index)
    linears = [(path, item) for path, item in layer.named_modules() if isinstance(item, nn.Linear)]
    matrices = [Matrix(path, *item.weight.shape) for path, item in linears]
    connections = [
        Matrix("fn", *item.fn.shape)
        for item in layer.modules()
        if isinstance(item, DeepseekV4HyperConnection)
    ]
    experts = layer.mlp.experts
    kind = sizes.layer_types[index]
    compressed = length / sizes.compress_rates[kind] / 2  # those before a token, on average
    seen = sizes.sliding_window + min(compressed, sizes.index_topk)
    between = _SCORED_AND_SUMMED * sizes.num_attention_heads * sizes.head_dim * seen
    if kind == _SPARSE:
        between += 2 * sizes.index_n_heads * sizes.index_head_dim * compressed
    expert_weights = experts.gate_up_proj[0].numel() + experts.down_proj[0].numel()
    all_weights = sum(parameter.numel() for parameter in layer.parameters())
    return LayerShape(
        matrices=tuple(matrices),
        router=(Matrix("router", sizes.n_routed_experts, sizes.hidden_size), *connections),
        experts=(
            Matrix("linear_fc1", *experts.gate_up_proj.shape[1:]),
            Matrix("linear_fc2", *experts.down_proj.shape[1:]),
        ),
        between=between,
        scan_bytes=0.0,
        quadratic=True,
        norms=2 + len(connections) * sizes.hc_mult * _STREAMS_READ,
        inner=sum(matrix.rows for matrix in matrices),
        blocks=2,
        keys=sizes.head_dim,
        weights=all_weights - sizes.n_routed_experts * expert_weights,
        expert_weights=expert_weights,
        seen=seen,
        head=sizes.head_dim,
        clamped=sizes.swiglu_limit is not None,
    )
