# SPDX-License-Identifier: Apache-2.0
"""Layers that differ: attention or feed-forward layer of another size, one linear layer in its place, or none."""

import dataclasses
from functools import partial
from typing import Any

from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.heterogeneous.heterogeneous_config import TransformerBlockConfig
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


def heterogeneous_layer(plain: ModuleSpec, block: TransformerBlockConfig) -> ModuleSpec:
    """The layer that ``block`` describes; its sizes come from the config that Megatron-Core asks for each layer.

    Args:
        plain: a decoder layer of the torch backend with attention and feed-forward layer.
        block: which of the two it has, and of what kind.
    """
    edits: dict[str, Any] = {}
    parts: Any = plain.submodules
    names: dict[str, str] = dict(parts.sharded_state_dict_keys_map)
    if block.attention.no_op:
        edits |= {"self_attention": ModuleSpec(module=IdentityOp), **_nothing("input_layernorm", "self_attn_bda")}
    elif block.attention.replace_with_linear:
        edits["self_attention"] = ModuleSpec(module=LinearReplacement)
        names["input_layernorm."] = "self_attention.layer_norm_"
    if block.mlp.no_op:
        edits |= {"mlp": IdentityOp, **_nothing("pre_mlp_layernorm", "mlp_bda")}
    elif block.mlp.replace_with_linear:
        edits["mlp"] = partial(LinearReplacement)
        names["pre_mlp_layernorm."] = "mlp.layer_norm_"
    edits["sharded_state_dict_keys_map"] = names
    return dataclasses.replace(plain, submodules=dataclasses.replace(parts, **edits))


def _nothing(norm: str, residual: str) -> dict[str, Any]:
    """What stands for a part that is left out: no norm, and nothing is added to the residual stream."""
    return {norm: IdentityOp, residual: IdentityFuncOp}


class LinearReplacement(ColumnParallelLinear):
    """A linear layer in the place, and with the call, of attention or of a feed-forward layer.

    Megatron-Core 0.19's own, ``ColumnParallelLinearGathered``, pads the sequence where it means to pad features,
    and so fails under sequence parallelism.
    """

    def __init__(self, config: TransformerConfig, **_: Any) -> None:
        assert config.init_method is not None, "Megatron-Core derives init_method"
        width = config.hidden_size
        super().__init__(width, width, config=config, init_method=config.init_method, bias=config.add_bias_linear)

    def forward(self, x: Tensor, **_: Any) -> tuple[Tensor, None]:  # type: ignore[override]
        """[s, b, hidden] of this rank's part of the sequence to the same, and no bias."""
        out = gather_from_tensor_model_parallel_region(super().forward(x)[0], group=self.tp_group)
        if self.config.sequence_parallel:
            out = scatter_to_sequence_parallel_region(out, group=self.tp_group)
        return out, None
