# SPDX-License-Identifier: Apache-2.0
"""Parts of architectures with multi-latent attention, and multi-token prediction layers."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from megatron.bridge.models.conversion.declare.blocks import Block, SizedBlock, fused_norm
from megatron.bridge.models.conversion.param_mapping import (
    AutoMapping,
    MegatronParamMapping,
    ReplicatedMapping,
    SwappedInputMapping,
)

_PROJECTIONS = {
    "linear_q_proj": "q_proj",
    "linear_q_down_proj": "q_a_proj",
    "linear_q_up_proj": "q_b_proj",
    "linear_kv_down_proj": "kv_a_proj_with_mqa",
    "linear_kv_up_proj": "kv_b_proj",
    "linear_proj": "o_proj",
}


def latent_attention(layers: str = "model.layers.*", norm: str = "input_layernorm") -> Block:
    """Multi-latent attention, with or without a query latent, and the normalization before it."""
    ours, theirs = "decoder.layers.*.self_attention", f"{layers}.self_attn"
    return (
        *(AutoMapping(f"{ours}.{mine}.weight", f"{theirs}.{hf}.weight") for mine, hf in _PROJECTIONS.items()),
        *fused_norm(f"{ours}.q_layernorm", f"{ours}.linear_q_up_proj", f"{theirs}.q_a_layernorm"),
        *fused_norm(f"{ours}.kv_layernorm", f"{ours}.linear_kv_up_proj", f"{theirs}.kv_a_layernorm"),
        ReplicatedMapping("decoder.layers.*.input_layernorm.weight", f"{layers}.{norm}.weight"),
    )


def indexer(layers: str = "model.layers.*") -> Block:
    """The indexer of sparse attention, which selects the keys that a query attends to."""
    ours, theirs = "decoder.layers.*.self_attention.core_attention.indexer", f"{layers}.self_attn.indexer"
    return tuple(
        ReplicatedMapping(f"{ours}.{prefix}{name}", f"{theirs}.{name}")
        for prefix, name in (
            ("linear_", "wq_b.weight"),
            ("linear_", "wk.weight"),
            ("", "k_norm.weight"),
            ("", "k_norm.bias"),
            ("linear_", "weights_proj.weight"),
        )
    )


@dataclass(frozen=True)
class MTPNames:
    """Hugging Face names of one multi-token prediction layer: prefixes without ``.weight``."""

    layer: str  # replaces the name of a decoder layer
    enorm: str  # norm of the next token's embedding
    hnorm: str  # norm of the current token's hidden state
    eh_proj: str  # projection of both, concatenated
    norm: str
    hidden_first: bool = field(default=False, kw_only=True)  # whether the hidden state comes first in the concatenation


def after_decoder_layers(config: Any, depth: int) -> MTPNames:
    """Return the names of layers that are numbered after the decoder's layers."""
    layer = f"model.layers.{config.num_layers + depth}"
    own = (f"{layer}.{name}" for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm"))
    return MTPNames(layer, *own)


def mtp(
    *layer: Block, layers: str = "model.layers.*", names: Callable[[Any, int], MTPNames] = after_decoder_layers
) -> SizedBlock:
    """Multi-token prediction layers.

    Each layer normalizes the embedding of the next token and the hidden state of the current one and projects both. A
    decoder layer and a final norm follow, then the model's own output layer.

    ``layer`` has the blocks of a decoder layer under the decoder's names. ``names`` returns the layer's names for a
    config and a depth.
    """

    def of(config: Any) -> Block:
        depths = range(config.mtp_num_layers or 0)
        return tuple(mapping for depth in depths for mapping in _depth(layer, depth, layers, names(config, depth)))

    return of


def _depth(layer: tuple[Block, ...], depth: int, layers: str, theirs: MTPNames) -> Block:
    ours = f"mtp.layers.{depth}"
    projection = SwappedInputMapping if theirs.hidden_first else AutoMapping
    own: Block = (
        ReplicatedMapping(f"{ours}.enorm.weight", f"{theirs.enorm}.weight"),
        ReplicatedMapping(f"{ours}.hnorm.weight", f"{theirs.hnorm}.weight"),
        projection(f"{ours}.eh_proj.weight", f"{theirs.eh_proj}.weight"),
        ReplicatedMapping(f"{ours}.final_layernorm.weight", f"{theirs.norm}.weight"),
    )

    def moved(mapping: MegatronParamMapping) -> MegatronParamMapping:
        return mapping.renamed(
            lambda name: name.replace("decoder.layers.*", f"{ours}.mtp_model_layer", 1),
            lambda name: name.replace(layers, theirs.layer, 1),
        )

    return (*own, *(moved(mapping) for block in layer for mapping in block))


def mtp_copies(layers: str = "model.layers.*", embedding: str = "model.embed_tokens.weight") -> dict[str, str]:
    """Return the tensors that checkpoints also store in each multi-token prediction layer, and their originals."""
    return {f"{layers}.embed_tokens.weight": embedding, f"{layers}.shared_head.head.weight": "lm_head.weight"}
