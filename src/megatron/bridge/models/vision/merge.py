# SPDX-License-Identifier: Apache-2.0
"""Features instead of placeholders, and what deeper layers add to them."""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from torch import Tensor, nn

from megatron.bridge.utils.errors import UserError


def media_rows(input_ids: Tensor, *placeholders: int | None) -> Tensor:
    """For each token [b, s], the row of the features that replaces it, -1 for text; samples are in image order.

    ``placeholders`` are the tokens of images, videos and audio, in this order, None for a kind that the model does
    not have. Rows of images come first, then those of videos and of audio, each in token order. Call this on full
    sequences: context parallelism splits its result like the tokens.
    """
    rows = torch.full_like(input_ids, -1)
    first = 0
    for token in dict.fromkeys(token for token in placeholders if token is not None):
        is_placeholder = input_ids == token
        count = int(is_placeholder.sum())
        rows[is_placeholder] = torch.arange(first, first + count, device=rows.device)
        first += count
    return rows


def look_ahead(
    input_ids: Tensor, image_token: int | None, video_token: int | None = None
) -> Tensor:
    """For each token [b, s] of full sequences, the number of later tokens of the same image or frame."""
    places = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
    inside = torch.zeros_like(input_ids, dtype=torch.bool)
    for token in (image_token, video_token):
        if token is not None:
            inside |= input_ids == token
    end = torch.where(inside, input_ids.shape[1], places).flip(-1).cummin(-1).values.flip(-1)
    return torch.where(inside, end - 1 - places, 0)


def prompt_look_ahead(loss_mask: Tensor, bounds: Sequence[int]) -> Tensor:
    """For each token [b, s], the number of later tokens of the same prompt.

    A prompt ends before the first trained token; without one, no token attends to later ones. Call this on whole
    sequences, like ``look_ahead``. ``loss_mask`` [b, s] is above zero where the next token is trained; ``bounds`` are
    those of the sequences of a packed row, ``[0, s]`` for any other row.
    """
    ahead = torch.zeros_like(loss_mask, dtype=torch.long)
    for start, stop in pairwise(bounds):
        last = (loss_mask[:, start:stop] > 0).int().argmax(-1, keepdim=True)
        ahead[:, start:stop] = last - torch.arange(stop - start, device=loss_mask.device)
    return ahead.clamp(min=0)


def check_rows(rows: Tensor, features: Tensor | None) -> None:
    """Refuse placeholders without images and images without placeholders."""
    placeholders = int((rows >= 0).sum())
    feature_rows = 0 if features is None else len(features)
    if placeholders != feature_rows:
        raise UserError(
            f"input_ids has {placeholders} placeholders for tokens of images, the images have "
            f"{feature_rows}: give each image "
            "as many placeholders as the tower makes tokens of it"
        )


class Places:
    """The positions of the features of ``rows`` [b, s] (-1 for none) in this rank's part of the residual stream."""

    def __init__(self, rows: Tensor, sequence_parallel: bool, device: torch.device) -> None:
        rows = rows.transpose(0, 1)
        self.sequence_parallel = sequence_parallel
        if sequence_parallel:
            ranks = parallel_state.get_tensor_model_parallel_world_size()
            rows = rows.chunk(ranks)[parallel_state.get_tensor_model_parallel_rank()]
        flat = rows.flatten()
        positions = torch.nonzero(flat >= 0).flatten()
        self.where, self.rows = (
            places.to(device, non_blocking=True) for places in (positions, flat[positions])
        )

    def whole_gradient(self, features: Tensor) -> Tensor:
        """The features; in the backward pass, gradients are summed over all parts of the sequence."""
        if not self.sequence_parallel:
            return features
        return tensor_parallel.copy_to_tensor_model_parallel_region(features)

    def put(self, stream: Tensor, features: Tensor) -> Tensor:
        """``stream`` [s, b, h] with features in place of the embeddings of placeholders."""
        values = features[self.rows].to(stream.dtype)
        return stream.flatten(0, 1).index_copy(0, self.where, values).view_as(stream)

    def add(self, stream: Tensor, features: Tensor) -> Tensor:
        """``stream`` [s, b, h] with the features added."""
        values = features[self.rows].to(stream.dtype)
        return stream.flatten(0, 1).index_add(0, self.where, values).view_as(stream)


class Deepstack:
    """Features that are added after the first layers of the decoder."""

    def __init__(self, layers: list[nn.Module]) -> None:
        self._current: tuple[Places, tuple[Tensor, ...]] | None = None
        for depth, layer in enumerate(layers):
            layer.register_forward_hook(partial(self._add, depth))

    def set(self, places: Places | None, features: tuple[Tensor, ...] = ()) -> None:
        """What the next pass of the decoder adds; nothing if None."""
        self._current = None if places is None else (places, features)

    def _add(self, depth: int, _module: nn.Module, _inputs: Any, output: Any) -> Any:
        if self._current is None:
            return output
        places, features = self._current
        stream, *rest = output if isinstance(output, tuple) else (output,)
        stream = places.add(stream, features[depth])
        return (stream, *rest) if isinstance(output, tuple) else stream
