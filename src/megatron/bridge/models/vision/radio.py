# SPDX-License-Identifier: Apache-2.0
"""RADIO, the vision tower of NVIDIA's models: transformers' modules with the parameters of its checkpoints."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron.bridge.models.vision.sharing import Anchor
from megatron.bridge.utils.errors import UserError


def as_stored(tower: Any, has_scales: bool) -> nn.Module:
    """``tower`` with one fused QKV matrix per layer, and with LayerScales only if it ``has_scales``."""
    config = tower.config.vision_config
    # transformers casts pixels to what its config says, which is how the tower was made and not how it is used
    config.dtype = next(tower.parameters()).dtype
    videos = tower.vision_model.embeddings.video_patch_projection is not None
    if videos and (rate := tower.config.video_pruning_rate):
        raise UserError(f"vision.video_pruning_rate={rate} is not supported: set it to 0")
    if not has_scales and config.layerscale_value != 1:
        raise UserError(
            f"vision_config.layerscale_value={config.layerscale_value} and the checkpoint has no LayerScales: set it "
            "to 1.0"
        )
    tower.vision_model.register_buffer(
        "summary_idxs", tower.vision_model.summary_idxs, persistent=False
    )
    tower.vision_model.register_forward_pre_hook(_with_grid, with_kwargs=True)
    if videos:
        tower.vision_model.embeddings.register_forward_hook(_with_both)
    for layer in tower.vision_model.encoder.layer:
        _fuse_qkv(layer.attention)
        if not has_scales:
            layer.layer_scale1 = layer.layer_scale2 = nn.Identity()
    return tower


def _with_grid(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Move the sizes of images to the device of the pixels, where transformers uses them."""
    grid = kwargs.get("image_grid_hw")
    return args, kwargs if grid is None else {**kwargs, "image_grid_hw": grid.to(args[0].device)}


def _with_both(embeddings: Any, _: Any, output: Tensor) -> Any:
    """``output`` for images or a video, connected to the matrices of both, so that all get a gradient."""
    for projection in (embeddings.patch_projection, embeddings.video_patch_projection):
        output = Anchor.apply(output, projection.weight)  # type: ignore[assignment]
    return output


def _fuse_qkv(attention: Any) -> None:
    """Replace three layers by one ``qkv``; transformers calls them in this order, with the same input."""
    parts = [getattr(attention, name) for name in ("q_proj", "k_proj", "v_proj")]
    width = sum(part.out_features for part in parts)
    first = parts[0]
    fused = nn.Linear(first.in_features, width, first.bias is not None, device=first.weight.device)
    with torch.no_grad():
        for name, parameter in fused.named_parameters():
            parameter.data = torch.cat([getattr(part, name) for part in parts])
    del attention.q_proj, attention.k_proj, attention.v_proj
    waiting: list[Tensor] = []
    attention.qkv = fused
    attention.q_proj = partial(_project_queries, attention, waiting)
    attention.k_proj = partial(_next_waiting, waiting)
    attention.v_proj = partial(_next_waiting, waiting)


def _project_queries(attention: Any, waiting: list[Tensor], hidden: Tensor) -> Tensor:
    queries, *waiting[:] = attention.qkv(hidden).chunk(3, dim=-1)
    return queries


def _next_waiting(waiting: list[Tensor], _: Tensor) -> Tensor:
    return waiting.pop(0)
