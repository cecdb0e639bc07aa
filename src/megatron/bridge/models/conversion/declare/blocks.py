# SPDX-License-Identifier: Apache-2.0
"""Parts of an architecture: each block names Megatron's parameters once, under all names of layer specs.

A normalization weight is a separate module, or fused into the linear that follows it; a block lists both, and a
model has one of them.
"""

from collections.abc import Callable
from typing import Any

from megatron.bridge.models.conversion.param_mapping import *

Block = tuple[MegatronParamMapping, ...]
SizedBlock = Callable[[Any], Block]
"""A block whose names depend on the sizes of the model, made from its config."""


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
    """Attention, and the normalization before it.

    Args:
        layers: Hugging Face's name of a layer.
        norm: the normalization before the attention; None where there is none.
        output: the output projection.
        qk_norm: queries and keys are normalized, by ``q_norm`` and ``k_norm``, by ``q_`` and ``k_`` what is given,
            or after the rotary embedding by the two that are given.
        fused: queries, keys and values are one tensor, ``qkv_proj`` or what is given.
        gated: the query projection makes gates on the output as well; or the name of a projection that does.
        names: Hugging Face's name of attention in a layer.
        grouped: the one tensor has the queries, the key and the value of one group after the other, not all
            queries first.
        turned: matrices are stored as [in, out].
    """
    ours, theirs = "decoder.layers.*.self_attention", f"{layers}.{names}"
    block: Block = (
        *_qkv(f"{ours}.linear_qkv", theirs, fused, gated, grouped, turned),
        *linear(f"{ours}.linear_proj", f"{layers}.{output}", turned),
    )
    if norm:
        block += fused_norm("decoder.layers.*.input_layernorm", f"{ours}.linear_qkv", f"{layers}.{norm}")
    if not qk_norm:
        return block
    # replicated if it is for one head, sharded like the heads if it is for all heads
    name = qk_norm if isinstance(qk_norm, str) else "norm"
    names_of = {role: f"{role}_{name}" for role in "qk"}
    if isinstance(qk_norm, tuple):
        ours, names_of = f"{ours}.late_", dict(zip("qk", qk_norm, strict=True))
    else:
        ours = f"{ours}."
    norms = (linear(f"{ours}{role}_layernorm", f"{theirs}.{own}") for role, own in names_of.items())
    return (*block, *(mapping for pair in norms for mapping in pair))


def _qkv(ours: str, theirs: str, fused: bool | str, gated: bool | str, grouped: bool, turned: bool) -> Block:
    if fused:
        theirs = f"{theirs}.{'qkv_proj' if fused is True else fused}"
        one = GroupedQKVMapping if grouped else ConcatenatedQKVMapping
        weight, bias = (one(f"{ours}.{name}", f"{theirs}.{name}") for name in ("weight", "bias"))
        return weight.turned() if turned else weight, bias
    if isinstance(gated, str):
        roles = {**{role: f"{theirs}.{role}_proj.weight" for role in "qkv"}, "gate": f"{theirs}.{gated}.weight"}
        return (SeparatelyGatedQKVMapping(f"{ours}.weight", **roles),)
    kind = GatedQKVMapping if gated else QKVMapping
    return tuple(
        kind(f"{ours}.{name}", **{role: f"{theirs}.{role}_proj.{name}" for role in "qkv"})
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
    """Feed-forward layer, and the normalization before it.

    Args:
        layers: Hugging Face's name of a layer.
        norm: the normalization before the feed-forward layer; None where there is none.
        names: Hugging Face's name of the feed-forward layer in a layer; empty where its parts lie in the layer.
        gated: there is a gate beside the up projection.
        fused: gate and up projection are one tensor, of this name; ``gate_up_proj`` if True.
        projections: Hugging Face's names of gate, up and down projection.
        turned: matrices are stored as [in, out]; of layers without a gate only.
    """
    ours, theirs = "decoder.layers.*.mlp", f"{layers}.{names}" if names else layers
    gate, up, down = (f"{theirs}.{name}" for name in projections)
    if fused:
        name = "gate_up_proj" if fused is True else fused
        pairs = ((f"{ours}.linear_fc1.{kind}", f"{theirs}.{name}.{kind}") for kind in ("weight", "bias"))
        fc1: Block = tuple(ConcatenatedGatedMLPMapping(*pair) for pair in pairs)
    else:
        fc1 = _gated(f"{ours}.linear_fc1", gate, up) if gated else linear(f"{ours}.linear_fc1", up, turned)
    block = (*fc1, *linear(f"{ours}.linear_fc2", down, turned))
    if norm:
        block += fused_norm("decoder.layers.*.pre_mlp_layernorm", f"{ours}.linear_fc1", f"{layers}.{norm}")
    return block


def _gated(ours: str, gate: str, up: str) -> Block:
    return tuple(
        GatedMLPMapping(f"{ours}.{name}", gate=f"{gate}.{name}", up=f"{up}.{name}") for name in ("weight", "bias")
    )


def post_norms(attention: str, mlp: str, layers: str = "model.layers.*") -> Block:
    """The normalizations after attention and feed-forward layer, before they are added to the residual stream."""
    names = {"self_attn_bda": attention, "mlp_bda": mlp}
    return tuple(
        ReplicatedMapping(f"decoder.layers.*.{ours}.norm.weight", f"{layers}.{theirs}.weight")
        for ours, theirs in names.items()
    )


def linear(megatron: str, hf: str, turned: bool = False) -> Block:
    """A linear layer that is one tensor on both sides, with or without a bias.

    Args:
        megatron: Megatron's name.
        hf: Hugging Face's name.
        turned: the matrix is stored as [in, out].
    """
    weight, bias = (AutoMapping(f"{megatron}.{name}", f"{hf}.{name}") for name in ("weight", "bias"))
    return weight.turned() if turned else weight, bias


def fused_norm(separate: str, linear: str, hf: str) -> Block:
    """A normalization, as a module of its own or fused into the linear layer that follows."""
    return tuple(
        ReplicatedMapping(megatron, f"{hf}.{name}")
        for name in ("weight", "bias")
        for megatron in (f"{separate}.{name}", f"{linear}.layer_norm_{name}")
    )


def replace_blocks(blocks: tuple[Block | SizedBlock, ...], *own: Block) -> tuple[Block | SizedBlock, ...]:
    """Return ``blocks``, in which an architecture's ``own`` replace the mappings of the same parameters."""
    taken = {mapping.megatron_param for block in own for mapping in block}
    kept = (it if callable(it) else tuple(m for m in it if m.megatron_param not in taken) for it in blocks)
    return (*kept, *own)
