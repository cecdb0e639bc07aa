# SPDX-License-Identifier: Apache-2.0
"""Divide images among the tensor- and context-parallel ranks, which hold the same tower.

Every rank holds all weights of the tower. Each encodes a part of the images, and the features are gathered. In the
backward pass, a tensor-parallel rank has the full gradient of all features, a context-parallel one that of its own
tokens. It is summed over context-parallel ranks, and each rank passes on the gradient of the images that it encoded.
"""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from megatron.bridge.models.vision import media as layouts
from megatron.bridge.models.vision.media import Media
from megatron.bridge.models.vision.tower import encode


def rank_share(config: Any) -> tuple[int, int]:
    """(rank, size) of the ranks among which a model's images are divided."""
    if not getattr(config, "share_images", False):
        return 0, 1
    group: Any = parallel_state.get_tensor_and_context_parallel_group()
    return group.rank(), group.size()


def features(
    tower: nn.Module, media: Media | None, share: bool, dummy: Media
) -> tuple[Tensor | None, Tensor | None]:
    """Features of all images of a microbatch, images before videos.

    ``media`` are the same on all ranks that share them, but for patches, which may be those of the rank's own images
    only. With ``share`` a part of the images is encoded here. ``dummy``, the smallest image, is encoded where there is
    none; its features are returned with the others [tokens, width].
    """
    trained = torch.is_grad_enabled() and any(
        parameter.requires_grad for parameter in tower.parameters()
    )
    with torch.set_grad_enabled(trained):
        kinds = layouts.split_kinds(media)
        costs = [cost for kind in kinds for cost in layouts.costs(kind)]
        group: Any = parallel_state.get_tensor_and_context_parallel_group()
        ranks = group.size() if share and all(map(layouts.can_share, kinds)) else 1
        owners = layouts.share_out(costs, ranks)
        local_images = [
            index for index, owner in enumerate(owners) if ranks == 1 or owner == group.rank()
        ]
        encoded = _encode_local_images(tower, kinds, local_images)
        spare = (
            encode(tower, _media_for_tower(tower, dummy)).rows
            if trained and not local_images
            else None
        )
        if not kinds:
            return None, spare
        if ranks == 1:
            return torch.cat([rows for rows, _ in encoded]), None
        counts, columns = _known_sizes(tower, costs) or _exchanged_sizes(
            tower, encoded, owners, group
        )
        # ranks without images take part in the collectives of the backward pass, too
        nothing = next(tower.parameters()).new_zeros(
            0, columns, requires_grad=torch.is_grad_enabled()
        )
        local = torch.cat([rows for rows, _ in encoded]) if encoded else nothing
        return _Gather.apply(local, counts, owners, group), spare  # type: ignore[return-value]


def _media_for_tower(tower: nn.Module, media: Media) -> Media:
    device = next(tower.parameters()).device
    return {
        name: value.to(device) if value.is_floating_point() else value
        for name, value in media.items()
    }


def _encode_local_images(
    tower: nn.Module, kinds: list[Media], local_images: list[int]
) -> list[tuple[Tensor, list[int]]]:
    """Feature rows, and the number per image, of this rank's images of each kind."""
    encoded = []
    first = 0
    for kind in kinds:
        total = len(layouts.costs(kind))
        here = [index - first for index in local_images if first <= index < first + total]
        first += total
        if here:
            chosen = kind if len(here) == total else layouts.select(kind, here)
            result = encode(tower, chosen)
            encoded.append((result.rows, result.counts))
    return encoded


def _known_sizes(tower: Any, costs: list[int]) -> tuple[list[int], int] | None:
    """Tokens of each image and the width of features, if they follow from the patches without communication."""
    if not hasattr(tower, "visual"):
        return None
    deep = getattr(tower.config.vision_config, "deepstack_visual_indexes", None) or ()
    patches = tower.visual.spatial_merge_size**2
    return [cost // patches for cost in costs], tower.config.get_text_config().hidden_size * (
        1 + len(deep)
    )


def _exchanged_sizes(
    tower: nn.Module, encoded: list[tuple[Tensor, list[int]]], owners: list[int], group: Any
) -> tuple[list[int], int]:
    """Tokens of each image and the width of features, exchanged between the ranks that encoded them."""
    device = next(tower.parameters()).device
    here = [index for index, owner in enumerate(owners) if owner == group.rank()]
    local_counts = [count for _, counts in encoded for count in counts]
    sizes = torch.zeros(len(owners) + 1, dtype=torch.long)
    sizes[here], sizes[-1] = (
        torch.tensor(local_counts, dtype=torch.long),
        encoded[0][0].shape[-1] if encoded else 0,
    )
    sizes = sizes.to(device)
    dist.all_reduce(sizes, op=dist.ReduceOp.MAX, group=group)
    *counts, columns = sizes.tolist()
    return counts, columns


class _Gather(torch.autograd.Function):
    """Gathers the rows of all ranks; backward, returns each rank's own part of the summed gradient."""

    @staticmethod
    def forward(
        ctx: Any, local: Tensor, counts: list[int], owners: list[int], group: Any
    ) -> Tensor:  # type: ignore[override]
        ranks = range(group.size())
        totals = [
            sum(n for n, owner in zip(counts, owners, strict=True) if owner == rank)
            for rank in ranks
        ]
        padded = local.new_zeros(max(totals), local.shape[-1])
        padded[: len(local)] = local
        parts = [torch.empty_like(padded) for _ in ranks]
        dist.all_gather(parts, padded, group=group)
        taken = [0] * group.size()
        pieces = []
        for count, owner in zip(counts, owners, strict=True):
            pieces.append(parts[owner][taken[owner] : taken[owner] + count])
            taken[owner] += count
        ctx.mine = [owner == group.rank() for owner in owners]
        ctx.counts = counts
        return torch.cat(pieces)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        gradient = gradient.contiguous()
        if parallel_state.get_context_parallel_world_size() > 1:
            gradient = gradient.clone()
            dist.all_reduce(gradient, group=parallel_state.get_context_parallel_group())
        parts = [
            part
            for part, is_local in zip(gradient.split(ctx.counts), ctx.mine, strict=True)
            if is_local
        ]
        local = torch.cat(parts) if parts else gradient[:0]
        # parameters' gradients are averaged over tensor-parallel ranks, and their sum is meant
        return local * parallel_state.get_tensor_model_parallel_world_size(), None, None, None


class Anchor(torch.autograd.Function):
    """Identity of the first tensor whose backward gives the second zeros, so that its parameters have a gradient."""

    @staticmethod
    def forward(ctx: Any, activation: Tensor, spare: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(spare)
        return activation.view_as(activation)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient, torch.zeros_like(ctx.saved_tensors[0])
