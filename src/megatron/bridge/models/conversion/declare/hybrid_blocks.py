# SPDX-License-Identifier: Apache-2.0
"""Parts that only hybrid models have."""

from megatron.bridge.models.conversion.declare.blocks import Block, fused_norm
from megatron.bridge.models.conversion.param_mapping import *


def mamba(
    layers: str, names: str = "mixer", norm: str | None = "norm", replaces_attention: bool = False, ours: str = "mixer"
) -> Block:
    """A Mamba-2 mixer and the normalization before it.

    ``norm`` is None if ``attention`` maps the normalization of the same layer. With ``replaces_attention``, the mixer
    replaces attention in some layers, and ``attention`` maps the normalization if it is a separate module. ``ours`` is
    Megatron's name of a mixer parallel to attention.
    """
    ours, theirs = f"decoder.layers.*.{'self_attention' if replaces_attention else ours}", f"{layers}.{names}"
    norms = fused_norm("decoder.layers.*.norm", f"{ours}.in_proj", f"{layers}.{norm}") if norm else ()
    if replaces_attention:
        norms = (ReplicatedMapping(f"{ours}.in_proj.layer_norm_weight", f"{layers}.{norm}.weight"),)
    return (
        *norms,
        MambaInProjMapping(f"{ours}.in_proj.weight", f"{theirs}.in_proj.weight"),
        MambaConv1dMapping(f"{ours}.conv1d_weight", f"{theirs}.conv1d.weight"),
        MambaConv1dMapping(f"{ours}.conv1d_bias", f"{theirs}.conv1d.bias"),
        *(
            ColumnParallelMapping(f"{ours}.{name}", f"{theirs}.{name}")
            for name in ("A_log", "D", "dt_bias", "norm.weight")
        ),
        AutoMapping(f"{ours}.out_proj.weight", f"{theirs}.out_proj.weight"),
    )


def selective_mamba(layers: str = "model.layers.*", names: str = "mamba", norm: str = "input_layernorm") -> Block:
    """A Mamba-1 mixer; ``attention`` maps the normalization before it if that is a separate module."""
    ours, theirs = "decoder.layers.*.self_attention", f"{layers}.{names}"
    same = ("A_log", "D", "out_proj.weight")
    pairs = {"conv1d_weight": "conv1d.weight", "conv1d_bias": "conv1d.bias", "x_proj": "x_proj.weight"}
    pairs |= {"dt_proj": "dt_proj.weight", "dt_bias": "dt_proj.bias", **dict(zip(same, same, strict=True))}
    return (
        ConcatenatedGatedMLPMapping(f"{ours}.in_proj.weight", f"{theirs}.in_proj.weight"),
        ReplicatedMapping(f"{ours}.in_proj.layer_norm_weight", f"{layers}.{norm}.weight"),
        *(AutoMapping(f"{ours}.{mine}", f"{theirs}.{hf}") for mine, hf in pairs.items()),
        *(ReplicatedMapping(f"{ours}.norms.{n}.weight", f"{theirs}.{n}_layernorm.weight") for n in ("dt", "b", "c")),
    )
