# SPDX-License-Identifier: Apache-2.0
"""KV sharing between layers, and keys that serve as values (Gemma 4).

A provider declares it in these fields:

* ``value_norm``: an RMSNorm without a gain normalizes the values.
* ``attention_k_eq_v``: in layers without a window, the values are the projected keys.
* ``shared_kv_layers``: these layers attend to the keys and values of the last layer of the same kind (with or
  without a window) that projects keys and values.
"""

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import all_gather_last_dim_from_tensor_parallel_region
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from megatron.bridge.utils.errors import UserError


def has_window(config: Any, layer: int) -> bool:
    """Return whether ``layer``, counted from 1, has an attention window."""
    return is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer)


def projections(config: Any, layer: int) -> str:
    """Return the projections of ``linear_qkv`` in ``layer``, counted from 1: ``q``, ``qk`` or ``qkv``."""
    if config.shared_kv_layers and config.shared_kv_layers[layer - 1]:
        return "q"
    return "qk" if config.attention_k_eq_v and not has_window(config, layer) else "qkv"


class SharedKVAttention(SelfAttention):
    """Attention with the projections that ``projections`` returns.

    Attributes:
        kept: keys before the rotary embedding, and values, from this layer until the last one that attends to them.
    """

    kept: tuple[Tensor, Tensor] | None = None

    def __init__(
        self,
        config: TransformerConfig,
        submodules: SelfAttentionSubmodules,
        layer_number: int,
        **other_arguments: Any,
    ) -> None:
        roles = projections(config, layer_number)

        def projection(inputs: int, outputs: int, **kwargs: Any) -> Any:
            left_out = (3 - len(roles)) * self.kv_projection_size
            return submodules.linear_qkv(inputs, outputs - left_out, **kwargs)

        own_submodules = dataclasses.replace(submodules, linear_qkv=projection)
        super().__init__(config, own_submodules, layer_number, **other_arguments)
        self.source: list[
            SharedKVAttention
        ] = []  # in a list, so that it does not become a submodule
        self.roles = roles
        self.is_source = False
        self.is_last = False
        if roles == "q":
            self.k_layernorm = None
        elif roles == "qk":
            self.get_submodule("linear_qkv").register_forward_hook(self._repeat_keys)

    def _repeat_keys(
        self, _module: Any, _inputs: Any, outputs: tuple[Tensor, Any]
    ) -> tuple[Tensor, Any]:
        """Append each group's key as its value, and return this rank's part, which may cut a group."""
        mixed = outputs[0]
        tensor_group: Any = self.pg_collection.tp
        groups = self.num_query_groups_per_partition
        all_groups: int = self.config.num_query_groups or self.config.num_attention_heads
        cuts_groups = all_groups < self.world_size
        if cuts_groups:
            mixed = all_gather_last_dim_from_tensor_parallel_region(mixed, group=tensor_group)
            groups = all_groups
        grouped = mixed.unflatten(-1, (groups, -1))
        keys = grouped[..., -self.hidden_size_per_attention_head :]
        with_values = torch.cat((grouped, keys), dim=-1).flatten(-2)
        if cuts_groups:
            with_values = with_values.chunk(self.world_size, dim=-1)[tensor_group.rank()]
        return with_values, outputs[1]

    def get_query_key_value_tensors(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Compute queries, keys and values, each [s, b, heads, width], before the rotary embedding."""
        if self.source:
            projected, _ = self.linear_qkv(hidden_states)  # type: ignore[operator]
            query = projected.unflatten(-1, (-1, self.hidden_size_per_attention_head))
            norm: Any = self.q_layernorm
            shared = self.source[0].kept
            assert shared is not None, "the layer with the keys comes first"
            if self.is_last:
                self.source[0].kept = None
            return (query if norm is None else norm(query)), *shared
        tensors: Any = super().get_query_key_value_tensors(hidden_states, *args, **kwargs)
        query, key, value = tensors
        value = F.rms_norm(value, value.shape[-1:], eps=self.config.layernorm_epsilon)
        if self.is_source:
            self.kept = key, value
        return query, key, value


def connect_shared_kv(model: torch.nn.Module, config: Any) -> None:
    """Connect each layer that shares keys and values to the layer that computes them."""
    sources: dict[bool, SharedKVAttention] = {}
    users: dict[SharedKVAttention, SharedKVAttention] = {}
    for module in model.modules():
        if not isinstance(module, SharedKVAttention):
            continue
        kind = has_window(config, module.layer_number)
        if module.roles != "q":
            sources[kind] = module
        elif kind not in sources:
            raise UserError(
                f"shared_kv_layers: layer {module.layer_number} shares the keys and values of a layer on another "
                "pipeline stage; they are not sent: set model.pipeline_model_parallel_size=1, or put both on one"
            )
        else:
            module.source, sources[kind].is_source = [sources[kind]], True
            users[sources[kind]] = module
    for last in users.values():
        last.is_last = True
