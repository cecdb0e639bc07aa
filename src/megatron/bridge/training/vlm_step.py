# SPDX-License-Identifier: Apache-2.0
"""The forward step of a vision-language model. Batches without images are those of a language model."""

from functools import partial
from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import get_model_config

from megatron.bridge.backends.attention.block_mask import remember_on_host
from megatron.bridge.models.vision.merge import look_ahead, media_rows, prompt_look_ahead
from megatron.bridge.training.gpt_step import (
    cut_sequences,
    masked_loss,
    on_device,
    packed_parameters,
    padding_arguments,
)
from megatron.bridge.training.state import BatchIterator, LossFunction
from megatron.bridge.training.step.trained_tokens import (
    bounds_on_host,
    cut_on_host,
    trained_token_arguments,
)
from megatron.bridge.utils.errors import UserError


def forward_step(
    data_iterator: BatchIterator, model: MegatronModule, *, all_tokens: bool = False
) -> tuple[torch.Tensor, LossFunction]:
    """Run one model chunk on the next microbatch.

    What depends on a full sequence (positions, which feature belongs to which token, how far an image sees ahead)
    is computed before context parallelism cuts it.

    With ``all_tokens``, losses of tokens that are not trained are computed, too, for your own loss function.

    Returns:
        The chunk's output (on the last stage the loss of each token, [micro_batch_size, sequence of this
        context-parallel rank], which may be zero for tokens that are not trained) and the function that computes
        the loss from it.
    """
    config: Any = get_model_config(model)
    batch = dict(next(data_iterator))
    media = batch.pop("media", None)
    if media and getattr(config, "vision", None) is None:
        raise UserError(
            "the batch has images, and the model has no vision tower: train a vision-language model, or remove "
            "the images"
        )
    rows = cut_on_host(media_rows(batch["tokens"], *config.placeholders), batch) if media else None
    extra: dict[str, Any] = {} if all_tokens else trained_token_arguments(model, batch)
    batch = _places(batch, config)
    if "cu_seqlens" in batch:
        extra["packed_seq_params"] = packed_parameters(batch)
    extra |= padding_arguments(batch, model)
    output = model(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        media=_media(media, config),
        media_rows=rows,
        **extra,
    )
    return output, partial(masked_loss, batch["loss_mask"])


def _media(media: dict[str, torch.Tensor] | None, config: Any) -> dict[str, torch.Tensor] | None:
    """The pixels on this rank's device in the precision of the model; sizes stay on the host, which reads them."""
    if not media:
        return None
    pixels = on_device({name: value for name, value in media.items() if value.is_floating_point()})
    return media | {name: value.to(config.params_dtype) for name, value in pixels.items()}


def _sight(batch: dict[str, Any], config: Any) -> torch.Tensor:
    """How many tokens each token of full sequences sees ahead."""
    if config.bidirectional_prompt:
        return prompt_look_ahead(batch["loss_mask"], bounds_on_host(batch).tolist())
    return look_ahead(batch["tokens"], config.image_token_id, config.video_token_id)


def _places(batch: dict[str, Any], config: Any) -> dict[str, Any]:
    """The batch as the model takes it on this rank's device, this rank's part of its sequences."""
    host = batch
    batch = on_device(batch)
    positions = batch["position_ids"]
    packed = "cu_seqlens" in batch
    # those of a packed row stay complete: Megatron-Core takes each rank's part of the angles
    flat = {} if packed else {"position_ids": positions.flatten(0, -2)}
    cut = cut_sequences(
        {key: value for key, value in batch.items() if key != "position_ids"} | flat
    )
    cut["position_ids"] = (
        positions if packed else cut["position_ids"].unflatten(0, positions.shape[:-1])
    )
    if config.looks_ahead:
        sight = cut_on_host(_sight(host, config), host)
        furthest = sight.flatten().tolist()  # each layer asks how far the furthest token sees
        cut["attention_mask"] = remember_on_host(
            sight.to(positions.device, non_blocking=True), furthest
        )
    return cut
