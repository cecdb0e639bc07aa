# SPDX-License-Identifier: Apache-2.0
"""Estimate the memory of a pass that keeps nothing for a backward pass, such as log-probabilities for RL."""

from typing import Any

from torch import nn

from megatron.bridge.autotune.activation_sizes import ActivationSizes, logits_of
from megatron.bridge.autotune.activations import counts_of_layer, rotary_bytes
from megatron.bridge.autotune.layers import is_dispatched, matrices


def forward_bytes(model: Any, layers: list[nn.Module], sizes: ActivationSizes) -> int:
    """Return the peak bytes of a forward pass through ``layers`` and the loss, without weights."""
    loss = 2 * sizes.stream_bytes + logits_of(model, sizes) * (sizes.bytes_per_element + 4)
    return rotary_bytes(model, sizes, len(layers)) + max(
        loss, *(_forward_of_layer(layer, sizes) for layer in layers)
    )


def _gathered_elements(sizes: ActivationSizes) -> int:
    """Return the elements per token that sequence parallelism gathers before a matrix product."""
    return sizes.hidden_size if sizes.sp_tokens < sizes.tokens else 0


def _forward_of_layer(layer: Any, sizes: ActivationSizes) -> int:
    """Return the peak bytes of a layer: inputs of model and layer, normed input, residual stream, and one block."""
    attention: Any = getattr(layer, "self_attention", None)
    if not hasattr(attention, "core_attention"):  # a scan, whose memory depends on its kernels
        return sizes.stream_bytes + counts_of_layer(layer, sizes).full
    in_attention = _forward_of_attention(attention, sizes) * sizes.tokens * sizes.bytes_per_element
    in_mlp = _forward_of_mlp(layer.mlp, sizes) * sizes.bytes_per_element
    return max(3 * sizes.stream_bytes + in_attention, 4 * sizes.stream_bytes + in_mlp)


def _forward_of_attention(attention: Any, sizes: ActivationSizes) -> int:
    """Return the elements per token."""
    config = attention.config
    heads = attention.num_attention_heads_per_partition
    if config.multi_latent_attention:
        plain = config.qk_head_dim
        rotated = config.qk_pos_emb_head_dim
        value = config.v_head_dim
        latents = (config.q_lora_rank or 0) + 2 * config.kv_lora_rank + rotated
        return latents + heads * (3 * (plain + rotated) + (plain + value) + 2 * rotated + value)
    width = attention.hidden_size_per_attention_head
    queries = heads * width
    keys = attention.num_query_groups_per_partition * width
    projected = queries + 2 * keys * max(1, sizes.kv_ranks)
    normed = 0
    if config.qk_layernorm:  # computed in fp32
        normed = queries * (2 + 8 // sizes.bytes_per_element)
    attended = queries + sizes.hidden_size
    if sizes.has_rope:
        attended += queries + keys
    return projected + max(_gathered_elements(sizes), normed, attended)


def _forward_of_mlp(mlp: nn.Module, sizes: ActivationSizes) -> int:
    """Return the elements of all tokens."""
    shapes = {path: (matrix.rows, matrix.columns) for path, matrix in matrices(mlp)}
    total = 0
    for path in [path for path in shapes if path.endswith("linear_fc2")]:
        first, width = shapes[path.removesuffix("2") + "1"]
        inner = shapes[path][1]
        activated = first + (1 + sizes.activation_tensors) * inner
        if is_dispatched(path):  # tokens in their original order and in the order of experts
            total += sizes.expert_tokens * (2 * width + activated)
        elif "shared_experts" in path:  # their output, while the routed experts run
            total += sizes.sp_tokens * sizes.hidden_size
        else:
            gathered = _gathered_elements(sizes) + first
            total += sizes.tokens * max(gathered, activated, inner + sizes.hidden_size)
    return total
