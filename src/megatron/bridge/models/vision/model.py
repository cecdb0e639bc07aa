# SPDX-License-Identifier: Apache-2.0
"""Megatron's ``GPTModel``, or hybrid model, with a vision tower in front of it."""

from contextlib import nullcontext
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt import GPTModel
from megatron.core.models.hybrid.hybrid_model import HybridModel
from torch import Tensor, nn

from megatron.bridge.backends.attention.block_mask import is_mask_of_valid_tokens
from megatron.bridge.models.vision import merge, sharing
from megatron.bridge.models.vision.media import Media, split_kinds
from megatron.bridge.models.vision.tower import is_video
from megatron.bridge.utils.errors import UserError


class WithVision(LanguageModule):
    """A decoder under its usual names; ``vision`` is the tower on the first pipeline stage, None on the others."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.embedding: Any
        self.decoder: Any
        self.vision: nn.Module | None = None
        self._deepstack: merge.Deepstack | None = None
        self._dummy: Media = {}

    def add_tower(self, tower: nn.Module, dummy: Media, deep_layers: int) -> None:
        """Add ``tower``; ``deep_layers`` are the layers after which its features are added."""
        self.vision = tower
        self._dummy = dummy
        if deep_layers:
            self._deepstack = merge.Deepstack(list(self.decoder.layers[:deep_layers]))

    @property
    def language_model(self) -> "WithVision":
        """The model itself, under the name that scripts for a wrapper use."""
        return self

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None = None,
        decoder_input: Tensor | None = None,
        *args: Any,
        media: Media | None = None,
        media_rows: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """As ``GPTModel.forward``, with images.

        Args:
            input_ids: [b, s], a placeholder for each token of an image.
            position_ids: [b, s], or [3, b, s] for multimodal rotary embeddings
                (``megatron.bridge.data.media.positions``).
            attention_mask: None, or booleans [b, s] that are true for valid tokens, for causal attention. Of models
                with ``bidirectional_images``, ``merge.look_ahead`` of the full sequence, which context parallelism
                and packed rows need; of models with ``bidirectional_prompt``, ``merge.prompt_look_ahead`` of it.
            decoder_input: embeddings to use; the tower does not run.
            *args: of ``GPTModel.forward``.
            media: tensors of the images under transformers' names: ``pixel_values``, ``image_grid_thw``,
                ``pixel_values_videos``, ``image_sizes``, ``input_features``, ...; None without images and audio.
                Other stages than the first ignore them.
            media_rows: [b, s], the row of the features for each token (``merge.media_rows``), needed under
                context parallelism; None finds the placeholders. A GPU waits for rows that are not on the host.
            **kwargs: of ``GPTModel.forward``.
        """
        if self.config.mrope_section and media and position_ids.dim() == 2:
            raise UserError(
                "position_ids is [batch, sequence] and the sample has images: give [3, batch, sequence] of "
                "megatron.bridge.data.media.positions.mrope_positions"
            )
        if attention_mask is not None and is_mask_of_valid_tokens(attention_mask):
            attention_mask = None  # causal attention ignores it, see TorchAttention.forward
        config: Any = self.config
        if config.bidirectional_images and attention_mask is None:
            attention_mask = self._sight(input_ids)
        if config.bidirectional_prompt and attention_mask is None and media:
            raise UserError(
                "attention_mask is missing: the model cannot know where a prompt ends, compute it from the full "
                "sequence with megatron.bridge.models.vision.merge.prompt_look_ahead"
            )
        if self.vision is not None and decoder_input is None:
            decoder_input = self._embed(input_ids, position_ids, media, media_rows)
        given: list[Any] = [input_ids, position_ids, attention_mask, decoder_input, *args]
        try:
            return super().forward(*given, **kwargs)
        finally:
            if self._deepstack:
                self._deepstack.set(None)

    def _embed(
        self, input_ids: Tensor, position_ids: Tensor, media: Media | None, rows: Tensor | None
    ) -> Tensor:
        """Embeddings [s, b, h] of text and images."""
        config: Any = self.config
        assert self.vision is not None
        image_features, spare = sharing.features(
            self.vision, media, config.share_images, self._dummy
        )
        rows = self._find_rows(input_ids, media) if rows is None else rows
        if parallel_state.get_context_parallel_world_size() == 1:
            merge.check_rows(rows, image_features)
        replaced = rows.to(input_ids.device, non_blocking=True) >= 0
        # placeholders may lie outside the vocabulary; their per-layer embeddings are those of padding
        text = input_ids.masked_fill(replaced, config.embedding_padding_idx or 0)
        per_layer_inputs: Any = getattr(self, "per_layer_inputs", None)
        with per_layer_inputs.deferred() if per_layer_inputs else nullcontext():
            embeddings = self.embedding(input_ids=text, position_ids=position_ids)
        if image_features is not None:
            embeddings = self._merged(embeddings, image_features, rows)
        if spare is not None:
            embeddings = sharing.Anchor.apply(embeddings, spare)
        if per_layer_inputs:
            per_layer_inputs.give_to_layers(text, embeddings)
        return embeddings  # type: ignore[return-value]

    def _merged(self, embeddings: Tensor, image_features: Tensor, rows: Tensor) -> Tensor:
        places = merge.Places(rows, self.config.sequence_parallel, image_features.device)
        first, *deep = places.whole_gradient(image_features).split(self.config.hidden_size, dim=-1)
        if self._deepstack:
            self._deepstack.set(places, tuple(deep))
        return places.put(embeddings, first)

    def _sight(self, input_ids: Tensor) -> Tensor | None:
        config: Any = self.config
        ahead = merge.look_ahead(input_ids, config.image_token_id, config.video_token_id)
        if parallel_state.get_context_parallel_world_size() == 1:
            return ahead
        if not bool(ahead.any()):
            return None
        raise UserError(
            "attention_mask is missing: under context_parallel_size > 1 compute it from the full sequence with "
            "megatron.bridge.models.vision.merge.look_ahead, and cut it like the tokens"
        )

    def _find_rows(self, input_ids: Tensor, media: Media | None) -> Tensor:
        config: Any = self.config
        if parallel_state.get_context_parallel_world_size() > 1:
            if not media:
                return torch.full_like(input_ids, -1)
            raise UserError(
                "media_rows is missing: under context_parallel_size > 1 compute it from the full sequence with "
                "megatron.bridge.models.vision.merge.media_rows, and cut it like the tokens"
            )
        video = config.video_token_id
        has_videos = any(map(is_video, split_kinds(media)))
        if has_videos and len(split_kinds(media)) > 1 and not bool((input_ids == video).any()):
            raise UserError(
                "media has images and videos, and input_ids no placeholder for videos: give media_rows, or one of "
                "the two"
            )
        return merge.media_rows(input_ids, *config.placeholders)


class VisionGPTModel(WithVision, GPTModel):
    """Attention in all layers, or something in its place."""


class VisionHybridModel(WithVision, HybridModel):
    """Layers with one job each."""
