# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingTypeStubs=false
"""Floating-point operations of a model, counted module by module: dense, experts, latents, windows, hybrids.

A matrix product of [a, b] and [b, c] is 2abc operations. Counted is what the model's mathematics asks for: a
causal token sees the tokens before it, experts compute what is routed to them, and nothing is computed twice.
Norms, activations and the softmax, under 1 % of a model of usual width, are left out.

* Attention: 2 x heads x (key width + value width) for each pair of a query and a key that it sees.
* Mamba-2 (Dao and Gu 2024, arXiv:2405.21060, section 6), for each token with chunks of Q tokens, H heads of width
  P, G groups and a state of N: 2 x Q/2 x (GN + HP) within a chunk, 4 x HPN into the state and out of it.
* Gated delta nets (Yang et al. 2024, arXiv:2412.06464), with chunks of 64: 6 x H x K x V for recalling, correcting
  and reading a state of K x V, and 64 x H x (2K + V) within a chunk.
"""

from collections.abc import Callable
from typing import Any

from torch import nn

_DELTA_CHUNK = 64


def forward_flops(model: nn.Module, sequence: int) -> float:
    """Operations of one forward pass over one sequence.

    Args:
        model: A whole model, as ``autotune.ranks.whole`` builds it; the meta device will do.
        sequence: Its tokens.
    """
    return sequence * sum(_per_token(path, module, sequence) for path, module in model.named_modules())


def training_flops(model: nn.Module, sequence: int) -> float:
    """Operations of a training step on one sequence: backward is twice forward, for inputs and for weights.

    Weights that are frozen have no gradient of their own.
    """
    frozen = sum(
        _matrix(path, module)
        for path, module in model.named_modules()
        if _matrix(path, module) and not any(weight.requires_grad for weight in module.parameters(recurse=False))
    )
    return 3 * forward_flops(model, sequence) - sequence * frozen


def _per_token(path: str, module: Any, sequence: int) -> float:
    for mark, count in _MIXERS.items():
        if hasattr(module, mark):
            return count(module, sequence)
    return _matrix(path, module)


def _matrix(path: str, module: Any) -> float:
    """Of a linear layer, the output layer included; an embedding only looks up."""
    if path.endswith("word_embeddings"):
        return 0
    if hasattr(module, "weight0"):  # experts: each token goes to some of them
        return 2 * module.weight0.numel() * module.config.moe_router_topk
    if path.endswith("output_layer"):
        config = module.config
        return 2 * config.hidden_size * config.vocab_size * (1 + (config.mtp_num_layers or 0))
    weight = getattr(module, "weight", None)
    if weight is None or weight.dim() != 2:
        return 0
    share = module.config.moe_router_topk / module.config.num_moe_experts if "local_experts" in path else 1
    return 2 * weight.numel() * share


def _attention(attention: Any, sequence: int) -> float:
    config = attention.config
    heads = attention.num_attention_heads_per_partition
    width = 2 * attention.hidden_size_per_attention_head
    if config.multi_latent_attention:
        width = config.qk_head_dim + config.qk_pos_emb_head_dim + config.v_head_dim
    return 2 * heads * width * _seen(attention.core_attention, sequence)


def _seen(core: Any, sequence: int) -> float:
    """Keys that a query sees on average, itself included."""
    window = getattr(core, "window", None)
    if window is None:  # Transformer Engine's own name
        window = getattr(core, "window_size", None)
    before = sequence - 1 if window is None or window[0] < 0 else min(window[0], sequence - 1)
    return 1 + before - before * (before + 1) / (2 * sequence)


def _mamba(mixer: Any, sequence: int) -> float:
    inner, state, chunk = mixer.d_inner_local_tp, mixer.d_state, min(mixer.chunk_size, sequence)
    groups = mixer.ngroups_local_tp * state
    convolution = 2 * mixer.conv1d.weight.numel()
    return chunk * (groups + inner) + 4 * inner * state + convolution


def _delta_net(net: Any, _sequence: int) -> float:
    heads, key, value = net.num_v_heads_local_tp, net.key_head_dim, net.value_head_dim
    convolution = 2 * net.conv1d.weight.numel()
    return heads * (6 * key * value + _DELTA_CHUNK * (2 * key + value)) + convolution


_MIXERS: dict[str, Callable[[Any, int], float]] = {
    "core_attention": _attention,
    "d_inner_local_tp": _mamba,
    "num_v_heads_local_tp": _delta_net,
}
"""By an attribute that only its modules have."""
