# SPDX-License-Identifier: Apache-2.0
"""Towers that take the patches of all images as one row (Qwen, GLM), without a loop over images or layers' waits.

Transformers computes positions and bounds of the images where their grids are. Here that is the host, so that a GPU
never stops for their sizes, and attention takes one variable-length kernel for the whole row.
"""

from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from megatron.bridge.backends.attention import flash_attention
from megatron.bridge.backends.attention.block_mask import AttentionWindow, host_values, remember_on_host

_NAME = "megatron_bridge_flash_varlen"  # transformers passes bounds to what has "flash" in its name


def use_varlen(visual: nn.Module) -> None:
    """Let transformers' ``visual`` read sizes on the host and attend to all images in one call."""
    import transformers

    transformers.AttentionInterface.register(_NAME, attend)  # type: ignore[arg-type]
    visual.config._attn_implementation = _NAME  # type: ignore[union-attr]
    visual.register_forward_pre_hook(_with_sizes, with_kwargs=True)


def _with_sizes(visual: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """What ``visual`` would compute from the grid, computed on the host and sent to the device of the patches."""
    grid, device = kwargs["grid_thw"].cpu(), args[0].device
    return args, kwargs | {name: _sent(value, device) for name, value in _sizes(visual, grid).items()}


def _sizes(visual: Any, grid: Tensor) -> dict[str, Any]:
    from transformers import vision_utils as sizes

    config, merge = visual.config, visual.spatial_merge_size
    bounds = sizes.get_vision_cu_seqlens(grid)
    found = {"grid_thw": grid, "position_ids": sizes.get_vision_position_ids(grid, merge)}
    found |= {"cu_seqlens": bounds, "max_seqlen": _longest(bounds)}
    if hasattr(config, "window_size"):
        order, bounds = sizes.get_vision_window_index(grid, merge, config.window_size, config.patch_size)
        found |= {"window_index": order, "cu_window_seqlens": bounds, "max_window_seqlen": _longest(bounds)}
    if hasattr(visual, "num_grid_per_side"):
        places, weights = sizes.get_vision_interpolation_indices_and_weights(
            grid, visual.num_grid_per_side, visual.interpolation_mode, visual.interpolation_align_corners, merge
        )
        found |= {"interp_indices": places, "interp_weights": weights}
    return found


def _longest(bounds: Tensor) -> int:
    return int(bounds.diff().max())


def _sent(value: Any, device: torch.device) -> Any:
    if not isinstance(value, Tensor):
        return value
    sent = value.to(device, non_blocking=True)
    return remember_on_host(sent, value.tolist()) if value.dtype == torch.int32 else sent  # bounds


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    scaling: float,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention [1, t, h, d] of [1, h, t, d]: each image, or window of one, is a sequence between two bounds."""
    q, k, v = (tensor.permute(2, 0, 1, 3) for tensor in (query, key, value))
    if flash_attention.is_supported(q) and not dropout:
        out = flash_attention.attend_packed(q, k, v, cu_seq_lens_q, max_length_q, AttentionWindow(), scaling)
        return out.transpose(0, 1), None
    bounds = host_values(cu_seq_lens_q)
    lengths = [stop - start for start, stop in pairwise(bounds)]
    runs = [(length, len(list(same))) for length, same in groupby(lengths)]
    parts = [tensor[0].split([length * count for length, count in runs], dim=1) for tensor in (query, key, value)]
    done = []
    for (length, _count), *qkv in zip(runs, *parts, strict=True):
        q, k, v = (part.unflatten(1, (-1, length)).transpose(0, 1) for part in qkv)  # [sequences, h, length, d]
        done.append(scaled_dot_product_attention(q, k, v, dropout_p=dropout, scale=scaling).transpose(1, 2))
    rows = [part.flatten(0, 1) for part in done]
    return (rows[0] if len(rows) == 1 else torch.cat(rows))[None], None
