# SPDX-License-Identifier: Apache-2.0
"""Parts of an architecture: each block maps Megatron's parameters under the names of all layer specs.

A normalization weight belongs to a separate module or is fused into the next linear layer. A block lists both names,
and a model has one of them.
"""

from collections.abc import Callable
from typing import Any

from megatron.bridge.models.conversion.mappings.head_gains import HeadGainsMapping
from megatron.bridge.models.conversion.param_mapping import (
    AutoMapping,
    ConcatenatedGatedMLPMapping,
    ConcatenatedQKVMapping,
    GatedMLPMapping,
    GatedQKVMapping,
    GroupedQKVMapping,
    MegatronParamMapping,
    QKVMapping,
    ReplicatedMapping,
    SeparatelyGatedQKVMapping,
)

Block = tuple[MegatronParamMapping, ...]
SizedBlock = Callable[[Any], Block]
"""A function that returns a block for a provider config, because names depend on the sizes of the model."""


def ends(
    embedding: str = "model.embed_tokens.weight",
    norm: str = "model.norm",
    head: str = "lm_head.weight",
    stack: str = "final_layernorm",
) -> Block:
    """Embedding, final normalization and output layer; ``stack`` is Megatron's name of the normalization."""
    return (
        AutoMapping("embedding.word_embeddings.weight", embedding),
        ReplicatedMapping(f"decoder.{stack}.weight", f"{norm}.weight"),
        ReplicatedMapping(f"decoder.{stack}.bias", f"{norm}.bias"),
        *linear("output_layer", head.removesuffix(".weight")),
    )


def attention(
    layers: str = "model.layers.*",
    norm: str | None = "input_layernorm",
    output: str = "self_attn.o_proj",
    qk_norm: bool | str | tuple[str, str] = False,
    fused: bool | str = False,
    gated: bool | str = False,
    names: str = "self_attn",
    grouped: bool = False,
    turned: bool = False,
) -> Block:
    """Attention and the normalization before it.

    Args:
        layers: Hugging Face name of a layer.
        norm: name of the normalization before attention; None if there is none.
        output: name of the output projection.
        qk_norm: names of the norms of queries and keys: True is ``q_norm`` and ``k_norm``; a string follows ``q_`` and
            ``k_``; a pair has the names of norms after the rotary embedding.
        fused: queries, keys and values are one tensor, ``qkv_proj`` or the given name.
        gated: the query projection also computes gates for the output; or the name of a separate gate projection.
        names: Hugging Face name of attention in a layer.
        grouped: the fused tensor stores the queries, the key and the value of each group together, instead of all
            queries first.
        turned: matrices are stored as [in, out].
    """
    megatron_name = "decoder.layers.*.self_attention"
    hf_name = f"{layers}.{names}"
    block: Block = (
        *_qkv_mappings(f"{megatron_name}.linear_qkv", hf_name, fused, gated, grouped, turned),
        *linear(f"{megatron_name}.linear_proj", f"{layers}.{output}", turned),
    )
    if norm:
        block += fused_norm(
            "decoder.layers.*.input_layernorm", f"{megatron_name}.linear_qkv", f"{layers}.{norm}"
        )
    if not qk_norm:
        return block
    # per-head norms are replicated; norms over all heads are sharded like the heads
    name = qk_norm if isinstance(qk_norm, str) else "norm"
    names_of = {role: f"{role}_{name}" for role in "qk"}
    if isinstance(qk_norm, tuple):
        megatron_name = f"{megatron_name}.late_"
        names_of = dict(zip("qk", qk_norm, strict=True))
    else:
        megatron_name = f"{megatron_name}."
    norms = (
        linear(f"{megatron_name}{role}_layernorm", f"{hf_name}.{hf_norm}")
        for role, hf_norm in names_of.items()
    )
    return (*block, *(mapping for pair in norms for mapping in pair))


def head_norms(layers: str = "model.layers.*.self_attn") -> SizedBlock:
    """Return a block of norms of queries and keys that Hugging Face stores head by head."""

    def list_norms(config: Any) -> Block:
        heads, groups = config.unpadded_heads
        mappings: list[MegatronParamMapping] = []
        for norm, count in (("q_layernorm", heads), ("k_layernorm", groups)):
            names = {str(head): f"{layers}.{norm}.norms.{head}.weight" for head in range(count)}
            megatron_name = f"decoder.layers.*.self_attention.{norm}.weight"
            mappings.append(HeadGainsMapping(megatron_name, names))
        return tuple(mappings)

    return list_norms


def _qkv_mappings(
    megatron_name: str,
    hf_name: str,
    fused: bool | str,
    gated: bool | str,
    grouped: bool,
    turned: bool,
) -> Block:
    if fused:
        hf_name = f"{hf_name}.{'qkv_proj' if fused is True else fused}"
        mapping_class = GroupedQKVMapping if grouped else ConcatenatedQKVMapping
        weight, bias = (
            mapping_class(f"{megatron_name}.{name}", f"{hf_name}.{name}")
            for name in ("weight", "bias")
        )
        return weight.turned() if turned else weight, bias
    if isinstance(gated, str):
        roles = {
            **{role: f"{hf_name}.{role}_proj.weight" for role in "qkv"},
            "gate": f"{hf_name}.{gated}.weight",
        }
        return (SeparatelyGatedQKVMapping(f"{megatron_name}.weight", **roles),)
    kind = GatedQKVMapping if gated else QKVMapping
    return tuple(
        kind(f"{megatron_name}.{name}", **{role: f"{hf_name}.{role}_proj.{name}" for role in "qkv"})
        for name in ("weight", "bias")
    )


def mlp(
    layers: str = "model.layers.*",
    norm: str | None = "post_attention_layernorm",
    names: str = "mlp",
    gated: bool = True,
    fused: bool | str = False,
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    turned: bool = False,
) -> Block:
    """Feed-forward layer and the normalization before it.

    Args:
        layers: Hugging Face name of a layer.
        norm: name of the normalization before the feed-forward layer; None if there is none.
        names: Hugging Face name of the feed-forward layer in a layer; empty if its parts are children of the layer.
        gated: whether the layer has a gate projection.
        fused: name of the tensor that fuses gate and up projection; ``gate_up_proj`` if True.
        projections: Hugging Face names of gate, up and down projection.
        turned: matrices are stored as [in, out]; only for layers without a gate.
    """
    megatron_name = "decoder.layers.*.mlp"
    hf_name = f"{layers}.{names}" if names else layers
    gate, up, down = (f"{hf_name}.{name}" for name in projections)
    if fused:
        name = "gate_up_proj" if fused is True else fused
        pairs = (
            (f"{megatron_name}.linear_fc1.{kind}", f"{hf_name}.{name}.{kind}")
            for kind in ("weight", "bias")
        )
        fc1: Block = tuple(ConcatenatedGatedMLPMapping(*pair) for pair in pairs)
    else:
        fc1 = (
            _gated_mappings(f"{megatron_name}.linear_fc1", gate, up)
            if gated
            else linear(f"{megatron_name}.linear_fc1", up, turned)
        )
    block = (*fc1, *linear(f"{megatron_name}.linear_fc2", down, turned))
    if norm:
        block += fused_norm(
            "decoder.layers.*.pre_mlp_layernorm", f"{megatron_name}.linear_fc1", f"{layers}.{norm}"
        )
    return block


def _gated_mappings(megatron_name: str, gate: str, up: str) -> Block:
    return tuple(
        GatedMLPMapping(f"{megatron_name}.{name}", gate=f"{gate}.{name}", up=f"{up}.{name}")
        for name in ("weight", "bias")
    )


def post_norms(attention: str, mlp: str, layers: str = "model.layers.*") -> Block:
    """The normalizations of the outputs of attention and feed-forward layer before the residual additions."""
    names = {"self_attn_bda": attention, "mlp_bda": mlp}
    return tuple(
        ReplicatedMapping(
            f"decoder.layers.*.{megatron_name}.norm.weight", f"{layers}.{hf_name}.weight"
        )
        for megatron_name, hf_name in names.items()
    )


def linear(megatron: str, hf: str, turned: bool = False) -> Block:
    """A linear layer, with or without bias, that is one tensor on both sides.

    Args:
        megatron: Megatron's name.
        hf: Hugging Face's name.
        turned: the matrix is stored as [in, out].
    """
    weight, bias = (
        AutoMapping(f"{megatron}.{name}", f"{hf}.{name}") for name in ("weight", "bias")
    )
    return weight.turned() if turned else weight, bias


def fused_norm(separate: str, linear: str, hf: str) -> Block:
    """A normalization that is a separate module or fused into the next linear layer."""
    return tuple(
        ReplicatedMapping(megatron, f"{hf}.{name}")
        for name in ("weight", "bias")
        for megatron in (f"{separate}.{name}", f"{linear}.layer_norm_{name}")
    )


def replace_blocks(
    blocks: tuple[Block | SizedBlock, ...], *replacements: Block
) -> tuple[Block | SizedBlock, ...]:
    """Return ``blocks``, in which an architecture's ``replacements`` replace the mappings of the same parameters."""
    taken = {mapping.megatron_param for block in replacements for mapping in block}
    unchanged = (
        block_or_sized
        if callable(block_or_sized)
        else tuple(m for m in block_or_sized if m.megatron_param not in taken)
        for block_or_sized in blocks
    )
    return (*unchanged, *replacements)
