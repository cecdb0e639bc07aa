# SPDX-License-Identifier: Apache-2.0
"""Transformers' own tower of images or audio, under its own names and with its own code.

A tower is transformers' multimodal model without its language model, so patches, windows, pixel shuffles and projectors
are computed by their original code. ``encode`` returns its features in one form for all families.

Some families take the patches of all images as one row (Qwen, GLM), without a loop over images. Transformers computes
positions and bounds of the images on the device of their grids. Here that is the host, so that the GPU never waits for
sizes, and attention is one variable-length kernel for the complete row.
"""

import copy
import inspect
import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from itertools import groupby, pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from megatron.bridge.backends.attention import flash_attention
from megatron.bridge.backends.attention.block_mask import (
    AttentionWindow,
    host_values,
    remember_on_host,
)
from megatron.bridge.models.hf_pretrained.own_configs import own_config
from megatron.bridge.models.vision.audio import AUDIO_MODELS
from megatron.bridge.models.vision.media import is_audio
from megatron.bridge.utils.errors import UserError

_NAME = "megatron_bridge_flash_varlen"  # transformers passes bounds to what has "flash" in its name


def use_varlen(visual: nn.Module) -> None:
    """Make transformers' ``visual`` read sizes on the host and attend to all images in one call."""
    import transformers

    transformers.AttentionInterface.register(_NAME, attend)  # type: ignore[arg-type]
    visual.config._attn_implementation = _NAME  # type: ignore[union-attr]
    visual.register_forward_pre_hook(_with_sizes, with_kwargs=True)


def _with_sizes(
    visual: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """What ``visual`` would compute from the grid, computed on the host and sent to the patches' device."""
    grid = kwargs["grid_thw"].cpu()
    device = args[0].device
    return args, kwargs | {
        name: _send_to_device(value, device) for name, value in _derived_sizes(visual, grid).items()
    }


def _derived_sizes(visual: Any, grid: Tensor) -> dict[str, Any]:
    from transformers import vision_utils as sizes

    config = visual.config
    merge = visual.spatial_merge_size
    bounds = sizes.get_vision_cu_seqlens(grid)
    derived = {"grid_thw": grid, "position_ids": sizes.get_vision_position_ids(grid, merge)}
    derived |= {"cu_seqlens": bounds, "max_seqlen": _longest_sequence(bounds)}
    if hasattr(config, "window_size"):
        order, bounds = sizes.get_vision_window_index(
            grid, merge, config.window_size, config.patch_size
        )
        derived |= {
            "window_index": order,
            "cu_window_seqlens": bounds,
            "max_window_seqlen": _longest_sequence(bounds),
        }
    if hasattr(visual, "num_grid_per_side"):
        places, weights = sizes.get_vision_interpolation_indices_and_weights(
            grid,
            visual.num_grid_per_side,
            visual.interpolation_mode,
            visual.interpolation_align_corners,
            merge,
        )
        derived |= {"interp_indices": places, "interp_weights": weights}
    return derived


def _longest_sequence(bounds: Tensor) -> int:
    return int(bounds.diff().max())


def _send_to_device(value: Any, device: torch.device) -> Any:
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
        out = flash_attention.attend_packed(
            q, k, v, cu_seq_lens_q, max_length_q, AttentionWindow(), scaling
        )
        return out.transpose(0, 1), None
    bounds = host_values(cu_seq_lens_q)
    lengths = [stop - start for start, stop in pairwise(bounds)]
    runs = [(length, len(list(same))) for length, same in groupby(lengths)]
    parts = [
        tensor[0].split([length * count for length, count in runs], dim=1)
        for tensor in (query, key, value)
    ]
    done = []
    for (length, _count), *qkv in zip(runs, *parts, strict=True):
        q, k, v = (
            part.unflatten(1, (-1, length)).transpose(0, 1) for part in qkv
        )  # [sequences, h, length, d]
        done.append(
            scaled_dot_product_attention(q, k, v, dropout_p=dropout, scale=scaling).transpose(1, 2)
        )
    rows = [part.flatten(0, 1) for part in done]
    return (rows[0] if len(rows) == 1 else torch.cat(rows))[None], None


_LANGUAGE = ("language_model", "text_model", "lm_head")
_AUDIO = ("audio_tower", "embed_audio")
_TILES = "NemotronH_Nano_VL_V2"
_LISTS_OF_IMAGES = ("idefics3", "smolvlm")  # they take a list of images for each sample
_LAYER = re.compile(r"\.layers?\.(\d+)\.")
_IMAGE, _VIDEO = "get_image_features", "get_video_features"


@dataclass(frozen=True)
class Features:
    """A tower's output for some images."""

    rows: Tensor
    """[tokens, hidden x (1 + deep)]: what replaces the embeddings of placeholders, and what deeper layers add."""
    counts: list[int]  # tokens of each image


def build_tower(
    vision: Mapping[str, Any], dtype: torch.dtype, initialize: bool = True
) -> nn.Module:
    """The vision part of transformers' model, with parameters in ``dtype``; buffers keep their precision.

    Of ``text_config``, only the width is needed. Without ``initialize``, weights are undefined until they are loaded.
    """
    from transformers.initialization import no_init_weights

    config = hf_config(vision)
    text = config.get_text_config()
    # the language model is built with no layers and one word, and then thrown away
    text.num_hidden_layers = 0
    text.vocab_size = 1
    text.pad_token_id = None
    if hasattr(text, "layers_block_type"):
        text.layers_block_type = []
    if config.model_type == "gemma4":
        config.audio_config = None  # its tower is as large as that of images
    try:
        with nullcontext() if initialize else no_init_weights():
            tower = _model_builder(config)(config, dtype=torch.float32)
    except (ValueError, TypeError, KeyError, RuntimeError) as error:
        raise UserError(f"vision: transformers cannot build this tower: {error}") from error
    carried = () if config.model_type in AUDIO_MODELS else _AUDIO
    for name in (*_LANGUAGE, *carried):
        if hasattr(tower, name):
            delattr(tower, name)
    for parameter in tower.parameters():
        drawn = parameter.data
        parameter.data = drawn.to(dtype) if initialize else torch.empty_like(drawn, dtype=dtype)
    for module in tower.modules():
        module.keeps_buffers_exact = True
    if hasattr(tower, "visual"):
        use_varlen(tower.visual)
    return tower


def _model_builder(config: Any) -> Any:
    """What builds transformers' model of ``config``."""
    import transformers

    if config.model_type == _TILES:
        from megatron.bridge.models.vision.nano_vl import NanoVLModel

        return NanoVLModel._from_config
    bare = type(config) in transformers.MODEL_MAPPING
    auto: Any = transformers.AutoModel if bare else transformers.AutoModelForImageTextToText
    return auto.from_config


def hf_config(vision: Mapping[str, Any]) -> Any:
    """Transformers' config object for the plain values ``vision``."""
    import transformers

    values = copy.deepcopy(dict(vision))
    kind = values.pop("model_type")
    config_class = own_config(kind)
    return (
        cast(Any, transformers.AutoConfig).for_model(kind, **values)
        if config_class is None
        else config_class(**values)
    )


def encode(tower: Any, media: Mapping[str, Tensor]) -> Features:
    """Features of images, or of videos: ``media`` are the arguments of transformers' function for them."""
    compute = _encoder_of(tower, media)
    known = inspect.signature(compute).parameters
    if unknown := sorted(name for name in media if name not in known):
        raise UserError(
            f"media has {unknown[0]}, which {type(tower).__name__} does not take: remove it"
        )
    device = next(tower.parameters()).device
    media = {
        name: value.to(device) if name.endswith("_position_ids") else value
        for name, value in media.items()
    }
    if tower.config.model_type in _LISTS_OF_IMAGES:
        media = {name: value[:, None] for name, value in media.items()}
    try:
        outputs = compute(**media, return_dict=True)
    except torch.OutOfMemoryError:
        raise
    except (TypeError, ValueError, IndexError, RuntimeError) as error:
        shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in media.items())
        raise UserError(
            f"{type(tower).__name__} of transformers cannot encode media with {shapes} ({error}): check the "
            "shapes, and model.vision"
        ) from error
    rows, counts = _flatten_features(_projected_features(tower, outputs))
    deep = [
        _flatten_features(part)[0] for part in getattr(outputs, "deepstack_features", None) or ()
    ]
    return Features(torch.cat((rows, *deep), dim=-1) if deep else rows, counts)


def _encoder_of(tower: Any, media: Mapping[str, Tensor]) -> Callable[..., Any]:
    """Return transformers' function that computes features of this kind of media."""
    kind = tower.config.model_type
    if is_audio(media) and kind not in AUDIO_MODELS:
        raise UserError(f"media has {next(iter(media))}: audio is not supported, remove it")
    if kind in AUDIO_MODELS and not is_audio(media):
        raise UserError(
            f"media has {next(iter(media))}, and {type(tower).__name__} takes audio only: remove it"
        )
    if kind == "qwen2_audio":
        return partial(_encode_qwen2_audio, tower)
    if kind == "voxtral":
        return tower.get_audio_features
    return getattr(tower, _VIDEO if is_video(media) else _IMAGE)


def _encode_qwen2_audio(
    tower: Any, input_features: Tensor, feature_attention_mask: Tensor, return_dict: bool = True
) -> Any:
    """Features of each recording, which transformers' Qwen2-Audio computes in its forward pass only.

    Args:
        tower: transformers' model without its language model.
        input_features: spectrograms [recordings, frequencies, frames], padded with silence.
        feature_attention_mask: [recordings, frames], 1 for frames that are not padding.
        return_dict: always true.
    """
    from transformers.masking_utils import create_bidirectional_mask
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    assert return_dict
    encoder = tower.audio_tower
    frame_counts, token_counts = encoder._get_feat_extract_output_lengths(
        feature_attention_mask.sum(-1).cpu()
    )
    encoded_frames = (input_features.shape[-1] - 2) // 2 + 1
    is_valid = torch.arange(encoded_frames) < frame_counts[:, None]
    mask = create_bidirectional_mask(  # on the host: transformers asks whether it hides anything
        config=encoder.config,
        inputs_embeds=torch.zeros(*is_valid.shape, 1, dtype=input_features.dtype),
        attention_mask=is_valid.long(),
    )
    if mask is not None:
        mask = mask.to(input_features.device, non_blocking=True)
    encoded = encoder(input_features, attention_mask=mask).last_hidden_state
    projected = tower.multi_modal_projector(encoded)
    features = tuple(
        recording[:count] for recording, count in zip(projected, token_counts.tolist(), strict=True)
    )
    return BaseModelOutputWithPooling(pooler_output=features)  # type: ignore[arg-type]


def _projected_features(tower: Any, outputs: Any) -> Any:
    if tower.config.model_type == "voxtral":  # of all stretches of 30 seconds, one after another
        return outputs.pooler_output.unflatten(0, (len(outputs.last_hidden_state), -1))
    if (
        tower.config.model_type == "llama4"
    ):  # transformers projects its images in the forward pass only
        return tower.multi_modal_projector(outputs.last_hidden_state)
    return outputs.pooler_output


def is_video(media: Mapping[str, Tensor]) -> bool:
    return any("video" in name for name in media)


def _flatten_features(features: Any) -> tuple[Tensor, list[int]]:
    """[tokens, hidden] and how many tokens each image has."""
    parts = [part.flatten(0, -2) for part in features]
    return torch.cat(parts), [len(part) for part in parts]


@cache
def unused_parameters(tower: Any) -> frozenset[str]:
    """Names of pooling heads and of the parameters after the last layer whose features are used."""
    names = [name for name, _ in tower.named_parameters()]
    return frozenset(
        name
        for name in names
        if name.startswith("vision_tower.") and _is_unused(name, tower.config)
    )


def _is_unused(name: str, config: Any) -> bool:
    if name.startswith(("vision_tower.head.", "vision_tower.vision_model.head.")):
        return True  # SigLIP's pooling
    taken = _layers_taken(config)
    if taken is None:
        return False
    layer = _LAYER.search(name)
    return "post_layernorm" in name or (layer is not None and int(layer[1]) >= taken)


def _layers_taken(config: Any) -> int | None:
    """Number of layers of the tower that features need; None for all layers and what follows."""
    chosen = getattr(config, "vision_feature_layer", None)
    if chosen is None:
        return None
    layers = config.vision_config.num_hidden_layers
    chosen_layers = [chosen] if isinstance(chosen, int) else list(chosen)
    return max(layer if layer >= 0 else layers + 1 + layer for layer in chosen_layers)


def dummy_media(tower: Any) -> dict[str, Tensor]:
    """Tensors of the smallest image or sound, under the names that transformers has for them."""
    config = tower.config
    if config.model_type in AUDIO_MODELS:
        return _dummy_sound(config)
    return _dummy_image(tower, config)


def _dummy_image(tower: Any, config: Any) -> dict[str, Tensor]:
    if hasattr(tower, "visual"):
        return _dummy_patches(config.vision_config)
    if config.model_type == "nemotron_h_omni":
        side = round(1 / config.downsample_ratio)
        patches = torch.ones(side**2, config.vision_config.patch_dim)
        return {"pixel_values": patches, "image_grid_hw": torch.tensor([[side, side]])}
    if config.model_type in ("gemma4", "gemma4_unified"):
        return _dummy_places(config.vision_config)
    size = _image_side(config)
    pixels = torch.ones(1, getattr(config.vision_config, "num_channels", 3), size, size)
    if config.model_type == "mistral3":  # transformers fails with a single token
        return {
            "pixel_values": pixels.repeat(1, 1, 1, 2),
            "image_sizes": torch.tensor([[size, 2 * size]]),
        }
    if config.model_type in ("llava_next", "llava_onevision"):
        return _dummy_tiles(config, pixels)
    return {"pixel_values": pixels}


def _dummy_sound(config: Any) -> dict[str, Tensor]:
    """Sound of the only length that the tower takes."""
    audio = config.audio_config
    frames = 2 * audio.max_source_positions  # the second convolution halves them
    media = {"input_features": torch.zeros(1, audio.num_mel_bins, frames)}
    if config.model_type == "qwen2_audio":
        media["feature_attention_mask"] = torch.ones(1, frames, dtype=torch.long)
    return media


def _dummy_patches(vision: Any) -> dict[str, Tensor]:
    merge = vision.spatial_merge_size
    channels = getattr(vision, "in_channels", 3)
    width = channels * vision.temporal_patch_size * vision.patch_size**2
    return {
        "pixel_values": torch.ones(merge**2, width),
        "image_grid_thw": torch.tensor([[1, merge, merge]]),
    }


def _dummy_places(vision: Any) -> dict[str, Tensor]:
    """An image of one token, as patches with their columns and rows."""
    merged_side = getattr(vision, "model_patch_size", None)
    patch_side = merged_side or vision.patch_size
    side = 1 if merged_side else vision.pooling_kernel_size
    rows, columns = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    return {
        "pixel_values": torch.ones(1, side**2, 3 * patch_side**2),
        "image_position_ids": torch.stack((columns, rows), dim=-1).flatten(0, 1)[None],
    }


def _image_side(config: Any) -> int:
    """Pixels along a side."""
    vision = config.vision_config
    if config.model_type == _TILES:
        return config.force_image_size or vision.image_size
    if config.model_type == "mistral3":
        return vision.patch_size * config.spatial_merge_size
    return vision.image_size if isinstance(vision.image_size, int) else vision.image_size[0]


def _dummy_tiles(config: Any, pixels: Tensor) -> dict[str, Tensor]:
    """A square image, which needs the fewest tiles: one, and a copy of the whole."""
    from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

    size = pixels.shape[-1]
    count = image_size_to_num_patches([size, size], config.image_grid_pinpoints, size)
    return {
        "pixel_values": pixels[:, None].expand(-1, count, -1, -1, -1),
        "image_sizes": torch.tensor([[size, size]]),
    }
