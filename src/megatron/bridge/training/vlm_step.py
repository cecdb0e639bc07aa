# SPDX-License-Identifier: Apache-2.0
"""The forward step of a vision-language model. Batches without images are those of a language model."""

from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import get_model_config

from megatron.bridge.models.vision.merge import look_ahead, media_rows
from megatron.bridge.training.gpt_step import cut_sequences, masked_loss, on_device, packed_parameters
from megatron.bridge.training.state import BatchIterator, LossFunction
from megatron.bridge.utils.errors import UserError


def forward_step(data_iterator: BatchIterator, model: MegatronModule) -> tuple[torch.Tensor, LossFunction]:
    """Run one model chunk on the next microbatch.

    What depends on a whole sequence (positions, which feature belongs to which token, how far an image sees ahead)
    is computed before context parallelism cuts it.

    Returns:
        The chunk's output (on the last stage the loss of each token, [micro_batch_size, sequence of this
        context-parallel rank]) and the function that computes the loss from it.

    Raises:
        UserError: The model has no vision tower, and the batch has images.
    """
    config: Any = get_model_config(model)
    batch = dict(next(data_iterator))
    media = batch.pop("media", None)
    if media and getattr(config, "vision", None) is None:
        raise UserError(
            "the batch has images, and the model has no vision tower: train a vision-language model, or remove "
            "the images"
        )
    batch = _places(on_device(batch), config, has_images=bool(media))
    extra: dict[str, Any] = {}
    if "cu_seqlens" in batch:
        extra["packed_seq_params"] = packed_parameters(batch)
    output = model(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        media=_media(media, config),
        media_rows=batch.get("media_rows"),
        **extra,
    )
    return output, partial(masked_loss, batch["loss_mask"])


def _media(media: dict[str, torch.Tensor] | None, config: Any) -> dict[str, torch.Tensor] | None:
    """The images on this rank's device, in the precision of the model."""
    if not media:
        return None
    return {
        name: value.to(config.params_dtype) if value.is_floating_point() else value
        for name, value in on_device(media).items()
    }


def _places(batch: dict[str, Any], config: Any, has_images: bool) -> dict[str, Any]:
    """The batch as the model takes it, this rank's part of its sequences."""
    tokens, positions = batch["tokens"], batch["position_ids"]
    extra = {}
    if config.bidirectional_images:
        extra["sight"] = look_ahead(tokens, config.image_token_id)
    if has_images and parallel_state.get_context_parallel_world_size() > 1:
        extra["media_rows"] = media_rows(tokens, config.image_token_id, None)
    packed = "cu_seqlens" in batch
    # those of a packed row stay whole: Megatron-Core takes each rank's part of the angles
    flat = {} if packed else {"position_ids": positions.flatten(0, -2)}
    cut = cut_sequences({key: value for key, value in batch.items() if key != "position_ids"} | flat | extra)
    cut["position_ids"] = positions if packed else cut["position_ids"].unflatten(0, positions.shape[:-1])
    if "sight" in cut:
        cut["attention_mask"] = cut.pop("sight")
    return cut
