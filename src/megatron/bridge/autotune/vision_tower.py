# SPDX-License-Identifier: Apache-2.0
"""Memory and FLOPs of a tower for images or audio, counted on meta tensors.

A tower is code of transformers, so no formulas exist for it. Its forward and backward passes run on the meta device
while the live storages are counted. Attention saves the tensors that fused kernels save, without scores.
"""

import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from megatron.bridge.models.vision.tower import dummy_media, encode

_NAME = "megatron_bridge_counted"


@dataclass(frozen=True)
class TowerCounts:
    """Activation bytes of a tower for one microbatch."""

    kept: int  # saved by the forward pass for the backward pass
    working: int  # temporary tensors of the backward pass


NO_TOWER = TowerCounts(0, 0)


def tower_counts(tower: Any, tokens: int) -> TowerCounts:
    """Count the bytes that a tower needs for ``tokens`` image tokens.

    Args:
        tower: A tower from ``build_tower`` on the meta device.
        tokens: Decoder tokens that image features replace.
    """
    if not tokens:
        return NO_TOWER
    media = _make_image(tower, tokens)
    with LiveBytes() as live, _HostSizes(tower), _fused_attention(tower), _dropped_gradients(tower):
        features = encode(tower, media)
        held_bytes = live.now
        if features.rows.requires_grad:
            features.rows.backward(torch.empty_like(features.rows))
    scale = tokens / sum(features.counts)
    return TowerCounts(round(held_bytes * scale), round((live.peak - held_bytes) * scale))


def tower_flops(tower: Any, tokens: int) -> float:
    """Return the FLOPs of a forward and a backward pass for ``tokens`` image tokens; see ``tower_counts``."""
    if not tokens:
        return 0.0
    with FlopCounterMode(display=False) as counter, _HostSizes(tower), _dropped_gradients(tower):
        features = encode(tower, _make_image(tower, tokens))
        if features.rows.requires_grad:
            features.rows.backward(torch.empty_like(features.rows))
    return counter.get_total_flops() * tokens / sum(features.counts)


def _make_image(tower: Any, tokens: int) -> dict[str, Tensor]:
    """Create one image of about ``tokens`` tokens, or the smallest image if all have the same size, as audio has."""
    dtype = next(tower.parameters()).dtype
    height = math.isqrt(tokens)
    width = -(-tokens // height)
    media = {name: value.cpu() for name, value in dummy_media(tower).items()}
    if grid := next((name for name in media if name.startswith("image_grid")), None):
        media[grid] = media[grid] * torch.tensor([1, height, width][-media[grid].shape[-1] :])
        media["pixel_values"] = media["pixel_values"][:1].expand(int(media[grid].prod()), -1)
    elif "image_position_ids" in media:
        media = _padded_image(tower, tokens)
    elif tower.config.model_type == "mistral3":
        side = media["image_sizes"][0, 0]
        media["image_sizes"] = torch.stack((side * height, side * width))[None]
        media["pixel_values"] = media["pixel_values"].new_empty(
            1, 3, *media["image_sizes"][0].tolist(), device="meta"
        )
    return {
        name: value.to("meta", dtype) if value.is_floating_point() else value
        for name, value in media.items()
    }


def _padded_image(tower: Any, tokens: int) -> dict[str, Tensor]:
    """Create one image of Gemma 4 of about ``tokens`` tokens, or of the most that the processor makes."""
    tokens = min(tokens, getattr(tower.config, "vision_soft_tokens_per_image", None) or 280)
    smallest = dummy_media(tower)["pixel_values"]
    side = math.isqrt(smallest.shape[1])
    height = math.isqrt(tokens)
    width = tokens // height
    rows, columns = torch.meshgrid(
        torch.arange(height * side), torch.arange(width * side), indexing="ij"
    )
    return {
        "pixel_values": smallest[:, :1].expand(1, rows.numel(), -1),
        "image_position_ids": torch.stack((columns, rows), dim=-1).flatten(0, 1)[None],
    }


@contextmanager
def _dropped_gradients(tower: nn.Module) -> Iterator[None]:
    """Free gradients of parameters as soon as they exist: the optimizer state already counts their buffers."""
    handles = [
        parameter.register_post_accumulate_grad_hook(
            lambda parameter: setattr(parameter, "grad", None)
        )
        for parameter in tower.parameters()
        if parameter.requires_grad
    ]
    yield
    for handle in handles:
        handle.remove()


@contextmanager
def _fused_attention(tower: nn.Module) -> Iterator[None]:
    """Make the tower's attention save what a fused kernel saves; PyTorch's kernels for meta tensors save scores."""
    import transformers

    name = (
        f"{_NAME}_flash" if hasattr(tower, "visual") else _NAME
    )  # transformers passes no mask to "flash"
    transformers.AttentionInterface.register(name, _attend_as_fused)  # type: ignore[arg-type]
    part_configs = [getattr(part, "config", None) for part in tower.modules()]
    configs = {
        id(config): config
        for config in part_configs
        if isinstance(config, transformers.PreTrainedConfig)
    }
    before = {key: config._attn_implementation for key, config in configs.items()}
    for config in configs.values():
        config._attn_implementation = name
    try:
        yield
    finally:
        for key, config in configs.items():
            config._attn_implementation = before[key]


def _attend_as_fused(
    _: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    return _Attention.apply(query, key, value, attention_mask), None  # type: ignore[return-value]


class _HostSizes(TorchFunctionMode):
    """Answer data-dependent calls of transformers: sizes stay on the host, and images have no padding."""

    def __init__(self, tower: Any) -> None:
        super().__init__()
        radio: Any = getattr(tower, "vision_model", None)
        self._picks_rows = hasattr(
            radio, "summary_idxs"
        )  # by image sizes on the host and by this buffer
        if self._picks_rows:
            radio.summary_idxs = torch.tensor(tower.config.vision_config.summary_idxs, device="cpu")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "as_tensor" or (name == "arange" and self._picks_rows):
            return func(*args)
        if (
            name == "to"
            and self._picks_rows
            and not (args[0].is_meta or args[0].is_floating_point())
        ):
            return args[0]
        if args and isinstance(args[0], Tensor) and args[0].is_meta:
            is_item = name in ("__getitem__", "__setitem__") and getattr(args[1], "is_meta", False)
            if is_item and args[1].dtype == torch.bool:  # a mask
                return args[0].clone() if name == "__getitem__" else None
            if name == "tolist":  # images of each sample
                return [1] * len(args[0])
            if name == "__bool__":  # whether all mask elements are true
                return True
        return func(*args, **(kwargs or {}))


class _Attention(torch.autograd.Function):
    """Attention from [b, h, t, d] to [b, t, h, d] that saves its inputs, its output, and one sum per row.

    Kernels give their output the layout of the query. If that is contiguous, transformers copies the output.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:  # type: ignore[override]
        batch, heads, length, _ = query.shape
        if query.is_contiguous():
            saved = value.new_empty(batch, heads, length, value.shape[-1])
        else:
            saved = value.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, mask, saved, sums)
        return saved.transpose(1, 2).contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return *(torch.empty_like(saved) for saved in ctx.saved_tensors[:3]), None


class LiveBytes(TorchDispatchMode):
    """Count the bytes of live storages that this thread allocated since it entered the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {storage._cdata for storage in _storages_in((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for storage in {storage._cdata: storage for storage in _storages_in(result)}.values():
            if storage._cdata not in given:  # views and in-place results use existing storages
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._freed, storage.nbytes())
        return result

    def _freed(self, size: int) -> None:
        self.now -= size


def _storages_in(tree: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
