# SPDX-License-Identifier: Apache-2.0
"""Layers with attention or feed-forward layers of different sizes, replaced by one linear layer, or left out."""

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
    """The parts of ``plain`` that ``block`` describes; Megatron-Core takes sizes from the config of each layer."""
    edits: dict[str, Any] = {}
    parts: Any = plain.submodules
    names: dict[str, str] = dict(parts.sharded_state_dict_keys_map)
    if block.attention.no_op:
        edits |= {"self_attention": ModuleSpec(module=IdentityOp), **_left_out("input_layernorm", "self_attn_bda")}
    elif block.attention.replace_with_linear:
        edits["self_attention"] = ModuleSpec(module=LinearReplacement)
        names["input_layernorm."] = "self_attention.layer_norm_"
    if block.mlp.no_op:
        edits |= {"mlp": IdentityOp, **_left_out("pre_mlp_layernorm", "mlp_bda")}
    elif block.mlp.replace_with_linear:
        edits["mlp"] = partial(LinearReplacement)
        names["pre_mlp_layernorm."] = "mlp.layer_norm_"
    edits["sharded_state_dict_keys_map"] = names
    return dataclasses.replace(plain, submodules=dataclasses.replace(parts, **edits))


def _left_out(norm: str, residual: str) -> dict[str, Any]:
    """No norm, and nothing that is added to the residual stream."""
    return {norm: IdentityOp, residual: IdentityFuncOp}


class LinearReplacement(ColumnParallelLinear):
    """A linear layer that replaces, and is called like, attention or a feed-forward layer.

    ``ColumnParallelLinearGathered`` of Megatron-Core 0.19 pads the sequence instead of the features, so it fails
    under sequence parallelism.
    """

    def __init__(self, config: TransformerConfig, **_: Any) -> None:
        assert config.init_method is not None, "Megatron-Core derives init_method"
        width = config.hidden_size
        super().__init__(width, width, config=config, init_method=config.init_method, bias=config.add_bias_linear)

    def forward(self, x: Tensor, **_: Any) -> tuple[Tensor, None]:  # type: ignore[override]
        """[s, b, hidden] to the same, and no bias."""
        out = gather_from_tensor_model_parallel_region(super().forward(x)[0], group=self.tp_group)
        if self.config.sequence_parallel:
            out = scatter_to_sequence_parallel_region(out, group=self.tp_group)
        return out, None
