# SPDX-License-Identifier: Apache-2.0
"""Parts of an architecture: each names Megatron's parameters once, in every spelling that a layer spec may use.

A normalisation weight is a module of its own, or fused into the linear that follows it; a block lists both, and a
model has one of them.
"""

from megatron.bridge.models.conversion.param_mapping import (
    AutoMapping,
    GatedMLPMapping,
    MegatronParamMapping,
    QKVMapping,
    ReplicatedMapping,
)

Block = tuple[MegatronParamMapping, ...]


def ends(
    embedding: str = "model.embed_tokens.weight",
    norm: str = "model.norm",
    head: str = "lm_head.weight",
) -> Block:
    """Embedding, final normalisation and output layer."""
    return (
        AutoMapping("embedding.word_embeddings.weight", embedding),
        ReplicatedMapping("decoder.final_layernorm.weight", f"{norm}.weight"),
        ReplicatedMapping("decoder.final_layernorm.bias", f"{norm}.bias"),
        AutoMapping("output_layer.weight", head),
    )


def attention(
    layers: str = "model.layers.*",
    norm: str = "input_layernorm",
    output: str = "self_attn.o_proj",
    qk_norm: bool = False,
) -> Block:
    """Attention with separate projections, and the normalisation before it.

    Args:
        layers: Hugging Face's name of a layer.
        norm: the normalisation before the attention.
        output: the output projection.
        qk_norm: queries and keys are normalised.
    """
    ours, theirs = "decoder.layers.*.self_attention", f"{layers}.self_attn"
    block: Block = (
        *(
            QKVMapping(
                f"{ours}.linear_qkv.{name}",
                q=f"{theirs}.q_proj.{name}",
                k=f"{theirs}.k_proj.{name}",
                v=f"{theirs}.v_proj.{name}",
            )
            for name in ("weight", "bias")
        ),
        *linear(f"{ours}.linear_proj", f"{layers}.{output}"),
        *fused_norm("decoder.layers.*.input_layernorm", f"{ours}.linear_qkv", f"{layers}.{norm}"),
    )
    if not qk_norm:
        return block
    norms = (ReplicatedMapping(f"{ours}.{role}_layernorm.weight", f"{theirs}.{role}_norm.weight") for role in "qk")
    return (*block, *norms)


def mlp(layers: str = "model.layers.*", norm: str = "post_attention_layernorm", names: str = "mlp") -> Block:
    """Gated feed-forward layer with separate gate and up projections, and the normalisation before it."""
    ours, theirs = "decoder.layers.*.mlp", f"{layers}.{names}"
    return (
        *(
            GatedMLPMapping(
                f"{ours}.linear_fc1.{name}", gate=f"{theirs}.gate_proj.{name}", up=f"{theirs}.up_proj.{name}"
            )
            for name in ("weight", "bias")
        ),
        *linear(f"{ours}.linear_fc2", f"{theirs}.down_proj"),
        *fused_norm("decoder.layers.*.pre_mlp_layernorm", f"{ours}.linear_fc1", f"{layers}.{norm}"),
    )


def linear(megatron: str, hf: str) -> Block:
    """A linear layer that is one tensor on both sides, with or without a bias."""
    return tuple(AutoMapping(f"{megatron}.{name}", f"{hf}.{name}") for name in ("weight", "bias"))


def fused_norm(separate: str, linear: str, hf: str) -> Block:
    """A normalisation, as a module of its own or fused into the linear layer that follows."""
    return tuple(
        ReplicatedMapping(megatron, f"{hf}.{name}")
        for name in ("weight", "bias")
        for megatron in (f"{separate}.{name}", f"{linear}.layer_norm_{name}")
    )
