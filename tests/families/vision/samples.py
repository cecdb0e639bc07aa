# SPDX-License-Identifier: Apache-2.0
"""Samples with images: token ids, transformers' tensors of the images, and positions."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron.bridge.data.media.positions import IMAGE, TEXT, VIDEO, mrope_positions

LENGTH = 40
START, IMAGE_TOKEN, VIDEO_TOKEN, AUDIO_TOKEN = 95, 99, 98, 97
PLACEHOLDERS = (IMAGE_TOKEN, VIDEO_TOKEN, AUDIO_TOKEN)


@dataclass(frozen=True)
class Piece:
    """An image or a video of a sample.

    Attributes:
        media: its tensors, each with one entry for it or with its patches.
        tokens: its tokens in the text.
        kind: what the tokens are: an image's or a video's.
    """

    media: dict[str, Tensor]
    tokens: list[int]
    kind: int = IMAGE

    @property
    def types(self) -> list[int]:
        return [self.kind if token in (IMAGE_TOKEN, VIDEO_TOKEN) else TEXT for token in self.tokens]


Maker = Callable[[Any, int, torch.Generator], Piece]
"""(config, which of several sizes, random numbers) -> an image or a video."""


@dataclass(frozen=True)
class Sample:
    """One row of a batch.

    Attributes:
        ids: [1, sequence].
        labels: [1, sequence].
        media: tensors of all images and videos.
        types: [1, sequence], 0 for text, 1 for images, 2 for videos.
    """

    ids: Tensor
    labels: Tensor
    media: dict[str, Tensor]
    types: Tensor
    extra: dict[str, Tensor] = field(default_factory=dict)


def make_sample(config: Any, pieces: list[Piece], seed: int) -> Sample:
    """Text around ``pieces``."""
    generator = torch.Generator().manual_seed(seed)
    text = iter(torch.randint(0, START - 1, (LENGTH,), generator=generator).tolist())
    ids, types = [next(text)], [TEXT]
    for piece in pieces:
        ids += [next(text), START, *piece.tokens]
        types += [TEXT, TEXT, *piece.types]
    ids += [next(text) for _ in range(LENGTH - len(ids))]
    types += [TEXT] * (LENGTH - len(types))
    assert len(ids) == LENGTH, f"{len(ids)} tokens do not fit"
    media: dict[str, list[Tensor]] = {}
    for piece in pieces:
        for name, value in piece.media.items():
            media.setdefault(name, []).append(value)
    labels = torch.randint(0, START - 1, (1, LENGTH), generator=generator)
    joined = {name: torch.cat(values) for name, values in media.items()}
    return Sample(torch.tensor([ids]), labels, joined, torch.tensor([types]))


def positions_of(sample: Sample, mrope: dict[str, Any] | None) -> Tensor:
    """[1, sequence], or [3, 1, sequence] where positions have three axes."""
    if mrope is None:
        return torch.arange(LENGTH)[None]
    grids = {name: sample.media[name].tolist() for name in _GRIDS if name in sample.media}
    given = dict(mrope)
    steps = [given.pop("time_step", 1.0)] * len(grids.get("video_grid_thw", []))
    found = mrope_positions(
        sample.types[0].numpy(),
        *(grids.get(name, []) for name in _GRIDS),
        time_steps=steps,
        **given,
    )
    return torch.from_numpy(found)[:, None]


_GRIDS = ("image_grid_thw", "video_grid_thw")


def recording(config: Any, which: int, generator: torch.Generator) -> Piece:
    """A recording of one of three lengths, padded with silence as Qwen2-Audio takes it."""
    audio = config.audio_config
    frames = 2 * audio.max_source_positions
    length = (9, 24, 15)[which]
    sound = torch.randn(1, audio.num_mel_bins, frames, generator=generator)
    sound[..., length:] = -1.5
    mask = (torch.arange(frames) < length).long()[None]
    tokens = ((length - 1) // 2 - 1) // 2 + 1
    return Piece({"input_features": sound, "feature_attention_mask": mask}, [AUDIO_TOKEN] * tokens)


def stretches(config: Any, which: int, generator: torch.Generator) -> Piece:
    """A recording as one or two stretches of equal length, as Voxtral takes it."""
    audio = config.audio_config
    count = (1, 2, 1)[which]
    shape = (count, audio.num_mel_bins, 2 * audio.max_source_positions)
    tokens = audio.max_source_positions * audio.hidden_size // audio.intermediate_size
    sound = torch.randn(shape, generator=generator)
    return Piece({"input_features": sound}, [AUDIO_TOKEN] * tokens * count)


# ---- images of the two layouts ----------------------------------------------------------------------------------

SIZES = ((2, 2), (4, 2), (2, 6))


def patches(config: Any, which: int, generator: torch.Generator) -> Piece:
    """An image as patches with a grid."""
    return _grid(
        config, (1, *SIZES[which]), generator, IMAGE, "pixel_values", "image_grid_thw", IMAGE_TOKEN
    )


def video(config: Any, which: int, generator: torch.Generator) -> Piece:
    """A video as patches with a grid."""
    names = ("pixel_values_videos", "video_grid_thw")
    return _grid(config, (2 + which, *SIZES[which]), generator, VIDEO, *names, VIDEO_TOKEN)


def video_by_frames(
    config: Any, which: int, generator: torch.Generator, token: int = VIDEO_TOKEN
) -> Piece:
    """A video with text between its frames."""
    grid = (2 + which, *SIZES[which])
    names = ("pixel_values_videos", "video_grid_thw")
    whole = _grid(config, grid, generator, VIDEO, *names, token)
    each = len(whole.tokens) // grid[0]
    return Piece(whole.media, ([token] * each + [START]) * grid[0], VIDEO)


def video_as_images(config: Any, which: int, generator: torch.Generator) -> Piece:
    """The same, its frames marked like images."""
    return video_by_frames(config, which, generator, IMAGE_TOKEN)


def packed_patches(config: Any, which: int, generator: torch.Generator) -> Piece:
    """An image as patches with a grid that has no frames."""
    (height, width), vision = SIZES[which], config.vision_config
    media = {
        "pixel_values": torch.randn(height * width, vision.patch_dim, generator=generator),
        "image_grid_hw": torch.tensor([[height, width]]),
    }
    return Piece(media, [IMAGE_TOKEN] * (height * width // 4))


def frames(config: Any, which: int, generator: torch.Generator) -> Piece:
    """The only video of a sample, as frames; an odd number of them, of which two are encoded together."""
    height, width = SIZES[which + 1]
    size = [side * config.vision_config.patch_size for side in (height, width)]
    media = {"pixel_values_videos": torch.randn(3, 3, *size, generator=generator)}
    return Piece(media, ([IMAGE_TOKEN] * (height * width // 4) + [START]) * 2)


def encoded_video(model: Any, media: dict[str, Tensor]) -> dict[str, Any]:
    """Features of a video, which transformers 5.23 computes and then joins as if they were a tuple."""
    if "pixel_values_videos" not in media:
        return media
    found = model.get_video_features(**media, return_dict=True)
    found.pooler_output = tuple(found.pooler_output)
    return {"mm_encoder_outputs": {"video": found}}


def whole_images(tokens: int) -> Maker:
    """Makes images of the tower's size, each ``tokens`` tokens."""

    def make(config: Any, which: int, generator: torch.Generator) -> Piece:
        size = _side(config.vision_config)
        return Piece(
            {"pixel_values": torch.randn(1, 3, size, size, generator=generator)},
            [IMAGE_TOKEN] * tokens,
        )

    return make


MERGED_SIZES = ((1, 2), (2, 2), (3, 1))  # of an image, in tokens
MOST_TOKENS = 5


def padded_patches(config: Any, which: int, generator: torch.Generator) -> Piece:
    """An image as patches with their columns and rows, padded to the same number."""
    pixels, places = _places(config.vision_config, MERGED_SIZES[which], generator)
    height, width = MERGED_SIZES[which]
    media = {"pixel_values": pixels, "image_position_ids": places}
    return Piece(media, [IMAGE_TOKEN] * (height * width))


def video_of_patches(config: Any, which: int, generator: torch.Generator) -> Piece:
    """A video as padded patches of its frames, with text between them."""
    height, width = MERGED_SIZES[which]
    frames = [_places(config.vision_config, (height, width), generator) for _ in range(2 + which)]
    media = {
        "pixel_values_videos": torch.cat([pixels for pixels, _ in frames]),
        "video_position_ids": torch.cat([places for _, places in frames]),
        "num_frames_per_video": torch.tensor([len(frames)]),
    }
    return Piece(media, ([VIDEO_TOKEN] * (height * width) + [START]) * len(frames), VIDEO)


def _places(
    vision: Any, size: tuple[int, int], generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Patches [1, most, values] of an image of ``size`` in tokens, and their columns and rows, -1 for padding."""
    merged_side = getattr(vision, "model_patch_size", None)
    side = 1 if merged_side else vision.pooling_kernel_size
    height, width = size[0] * side, size[1] * side
    count, most = height * width, MOST_TOKENS * side**2
    pixels = torch.zeros(1, most, 3 * (merged_side or vision.patch_size) ** 2)
    pixels[:, :count] = torch.rand(1, count, pixels.shape[-1], generator=generator)
    places = torch.full((1, most, 2), -1)
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    places[0, :count] = torch.stack((columns, rows), dim=-1).flatten(0, 1)
    return pixels, places


def some_tiles(config: Any, which: int, generator: torch.Generator) -> Piece:
    """An image as one to three tiles, each with a token for four patches."""
    side, count = config.force_image_size, (1, 2, 3)[which]
    pixels = torch.randn(count, 3, side, side, generator=generator)
    return Piece(
        {"pixel_values": pixels},
        [IMAGE_TOKEN] * (count * (side // config.vision_config.patch_size // 2) ** 2),
    )


def _side(vision: Any) -> int:
    return vision.image_size if isinstance(vision.image_size, int) else vision.image_size[0]


def pixtral(config: Any, which: int, generator: torch.Generator) -> Piece:
    """Images of several sizes in a tensor as large as the largest, with a token behind each row."""
    unit = config.vision_config.patch_size * config.spatial_merge_size
    height, width = (side * unit for side in ((1, 2), (2, 1), (1, 3))[which])
    pixels = torch.zeros(1, 3, 3 * unit, 3 * unit)
    pixels[:, :, :height, :width] = torch.randn(1, 3, height, width, generator=generator)
    row = [IMAGE_TOKEN] * (width // unit) + [START]
    media = {"pixel_values": pixels, "image_sizes": torch.tensor([[height, width]])}
    return Piece(media, row * (height // unit))


def tiles(config: Any, which: int, generator: torch.Generator) -> Piece:
    """Images of several shapes as tiles of the tower's size; how many tokens is for transformers to say."""
    from transformers import AutoModel
    from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

    size = config.vision_config.image_size
    shape = [[size, size], [2 * size, size], [size, 2 * size - 3]][which]
    count = image_size_to_num_patches(shape, config.image_grid_pinpoints, size)
    pixels = torch.zeros(1, 3, 3, size, size)
    pixels[:, :count] = torch.randn(1, count, 3, size, size, generator=generator)
    media = {"pixel_values": pixels, "image_sizes": torch.tensor([shape])}
    with torch.device("cpu"), torch.no_grad(), torch.random.fork_rng(devices=[]):
        found = (
            AutoModel.from_config(config)
            .get_image_features(**media, return_dict=True)
            .pooler_output
        )
    return Piece(media, [IMAGE_TOKEN] * sum(len(part) for part in found))


def _grid(config, grid, generator, kind, pixels, grids, token):
    vision = config.vision_config
    channels = getattr(vision, "in_channels", 3)
    width = channels * vision.temporal_patch_size * vision.patch_size**2
    count = grid[0] * grid[1] * grid[2]
    media = {pixels: torch.randn(count, width, generator=generator), grids: torch.tensor([grid])}
    return Piece(media, [token] * (count // vision.spatial_merge_size**2), kind)
