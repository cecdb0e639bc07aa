# SPDX-License-Identifier: Apache-2.0
"""Packed rows that each have a context-parallel group of their own (``model.hybrid_context_parallel``).

Core attention takes the group of a row from its ``PackedSeqParams``. Megatron-Core's attention layers take that of
their rotary embedding from themselves, and latent attention asks its config whether there is one. So a layer gets the
row's group and its size while it computes. Recomputation of layers calls them again with the arguments of the row, so
they have the same group then.
"""

import copy
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import Attention
from torch import nn


def group_of_row(
    packed: PackedSeqParams | None, of_layer: dist.ProcessGroup | None
) -> dist.ProcessGroup | None:
    """The group that splits a row: its own one, or that of the layer. None if it is not split."""
    if packed is None or (packed.cp_group is None and packed.local_cp_size is None):
        return of_layer
    return packed.cp_group


def follow_groups_of_rows(chunks: Iterable[nn.Module]) -> None:
    """Let all attention layers of ``chunks`` compute each row in the group of that row."""
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, Attention):
                module.register_forward_pre_hook(_take_group, with_kwargs=True)
                module.register_forward_hook(_return_group, always_call=True)


def _take_group(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    packed = kwargs.get("packed_seq_params")
    if packed is None or packed.cp_group is None:
        return
    layer.of_run = (layer.pg_collection, layer.config)
    layer.pg_collection = copy.copy(layer.pg_collection)
    layer.pg_collection.cp = packed.cp_group
    layer.config = copy.copy(layer.config)
    layer.config.context_parallel_size = packed.cp_group.size()


def _return_group(layer: Any, *_: Any) -> None:
    of_run = layer.__dict__.pop("of_run", None)
    if of_run is not None:
        layer.pg_collection, layer.config = of_run
