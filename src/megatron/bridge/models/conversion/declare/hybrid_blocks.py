# SPDX-License-Identifier: Apache-2.0
"""Parts of a hybrid model that no plain decoder has."""

from megatron.bridge.models.conversion.declare.blocks import Block, fused_norm
from megatron.bridge.models.conversion.param_mapping import (
    AutoMapping,
    ColumnParallelMapping,
    MambaConv1dMapping,
    MambaInProjMapping,
)


def mamba(layers: str, names: str = "mixer", norm: str = "norm") -> Block:
    """A Mamba-2 mixer, and the normalisation before it.

    Args:
        layers: Hugging Face's name of a layer.
        names: its name of the mixer in a layer.
        norm: its name of the normalisation in a layer.
    """
    ours, theirs = "decoder.layers.*.mixer", f"{layers}.{names}"
    return (
        *fused_norm("decoder.layers.*.norm", f"{ours}.in_proj", f"{layers}.{norm}"),
        MambaInProjMapping(f"{ours}.in_proj.weight", f"{theirs}.in_proj.weight"),
        MambaConv1dMapping(f"{ours}.conv1d_weight", f"{theirs}.conv1d.weight"),
        MambaConv1dMapping(f"{ours}.conv1d_bias", f"{theirs}.conv1d.bias"),
        *(
            ColumnParallelMapping(f"{ours}.{name}", f"{theirs}.{name}")
            for name in ("A_log", "D", "dt_bias", "norm.weight")
        ),
        AutoMapping(f"{ours}.out_proj.weight", f"{theirs}.out_proj.weight"),
    )
