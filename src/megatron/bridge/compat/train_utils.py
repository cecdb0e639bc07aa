# SPDX-License-Identifier: Apache-2.0
"""What trainers outside of this package do to models: value heads, frozen routers, statistics over ranks."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from megatron.bridge.checkpoint.model_io import as_chunks, unwrap
from megatron.bridge.models.features.heads import LinearForLastLayer

ModelHook = Callable[[Any], Any]
_FROZEN = {"router": ("weight", "bias"), "shared_experts": ("gate_weight", "gate_bias")}


def create_value_head_hook(
    hidden_size: int, sequence_parallel: bool = False, output_size: int = 1
) -> ModelHook:
    """A pre-wrap hook that replaces the output layer with ``LinearForLastLayer``, of ``output_size`` values."""

    def hook(model: Any) -> Any:
        for chunk in map(unwrap, as_chunks(model)):
            old: Any = getattr(chunk, "output_layer", None)
            if old is None or not getattr(chunk, "post_process", False):
                continue
            head = LinearForLastLayer(hidden_size, output_size, sequence_parallel=sequence_parallel)
            like: Any = next(chunk.parameters())
            chunk.output_layer = head.to(device=like.device, dtype=like.dtype)  # type: ignore[assignment]
        return model

    return hook


make_value_model = create_value_head_hook


def freeze_moe_router(model: Any) -> list[nn.Module]:
    """Freeze the routers and the gates of shared experts of a chunk or of all chunks, and return the chunks."""
    chunks = as_chunks(model)
    for chunk in chunks:
        for name, module in chunk.named_modules():
            for parameter in _FROZEN.get(name.rpartition(".")[2], ()):
                router_parameter = getattr(module, parameter, None)
                if isinstance(router_parameter, nn.Parameter):
                    router_parameter.requires_grad_(False)
    return chunks


def reduce_max_stat_across_model_parallel_group(
    stat: float | None, mp_group: torch.distributed.ProcessGroup
) -> float | None:
    """The largest value of the ranks of ``mp_group`` that have one; None if none has."""
    value = torch.tensor(
        [float("-inf") if stat is None else stat], device=torch.cuda.current_device()
    )
    torch.distributed.all_reduce(value, op=torch.distributed.ReduceOp.MAX, group=mp_group)
    return None if value.item() == float("-inf") else value.item()


def logical_and_across_model_parallel_group(
    input: bool, mp_group: torch.distributed.ProcessGroup
) -> bool:
    """Whether ``input`` is true on all ranks of ``mp_group``."""
    value = torch.tensor([int(bool(input))], device=torch.cuda.current_device())
    torch.distributed.all_reduce(value, op=torch.distributed.ReduceOp.MIN, group=mp_group)
    return bool(value.item())
