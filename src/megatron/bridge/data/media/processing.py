# SPDX-License-Identifier: Apache-2.0
"""Images and videos as a model takes them: expanded placeholders before tokenizing, pixels when a batch is made.

Pixels are computed by transformers' processors of the checkpoint. Its composite processor is not called: it would
decode images in order to count tokens, and would lose which characters belong to an answer.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from megatron.bridge.data.media.audio_processor import AUDIO_RULES, AudioProcessor
from megatron.bridge.data.media.expansion import EXPANSIONS, Grid
from megatron.bridge.data.media.media_rules import PROCESSOR_ERRORS, MediaRules
from megatron.bridge.data.media.positions import IMAGE, TEXT, VIDEO, Positions, mrope_positions
from megatron.bridge.data.media.processor import MediaProcessor, hash_of
from megatron.bridge.data.media.processor_files import (
    REMOTE_MODELS,
    chat_template,
    load_image_processor,
    read_config,
    read_json_file,
)
from megatron.bridge.data.media.references import (
    AudioReference,
    ImageReference,
    MediaReference,
    VideoReference,
    decode,
    refer,
    shown,
)
from megatron.bridge.data.media.videos import VideoProcessor, refer_video, zeros_without_memory
from megatron.bridge.models.vision.media import share_out
from megatron.bridge.utils.errors import UserError, one_line

if TYPE_CHECKING:
    from PIL import Image
    from transformers import PreTrainedTokenizerBase


BY_SAMPLE = ("idefics3", "smolvlm")
"""Families in which transformers' tensors are [samples, tiles, ...]."""
MAX_BLANKS = 1024  # cached tensors that stand for images of other ranks
_TENSORS = (
    "pixel_values",
    "image_grid_thw",
    "image_grid_hw",
    "image_position_ids",
    "image_sizes",
    "pixel_attention_mask",
)


Picture = ImageReference | VideoReference


def _pictures(media: Sequence[MediaReference]) -> list[Picture]:
    """The same references, of which ``references`` has refused audio."""
    return [item for item in media if not isinstance(item, AudioReference)]


def load_media_processor(rules: MediaRules, hf: "PreTrainedTokenizerBase") -> MediaProcessor:
    """The processor of images or audio of a checkpoint; ``hf`` is its tokenizer."""
    config = read_config(rules.processor_path)
    if config.get("model_type") in AUDIO_RULES:
        return AudioProcessor(rules, hf, config)
    return ImageProcessor(rules, hf, config)


class ImageProcessor(MediaProcessor):
    """The images and videos of a run; the special tokens of the tokenizer ``hf`` are the placeholders."""

    def __init__(
        self, rules: MediaRules, hf: "PreTrainedTokenizerBase", config: Mapping[str, Any]
    ) -> None:
        super().__init__(rules)
        path = rules.processor_path
        kind = config.get("model_type", "")
        if kind not in EXPANSIONS:
            raise UserError(
                f"dataset.hf_processor_path={path} is a {kind or 'model without model_type'}: images are "
                f"supported for {', '.join(EXPANSIONS)}, audio for {', '.join(AUDIO_RULES)}"
            )
        self.hf_processor = load_image_processor(
            path, rules, config if kind in REMOTE_MODELS else None
        )
        processor_config = read_json_file(path, "processor_config.json")
        values = {
            **config,
            **{key: value for key, value in processor_config.items() if value is not None},
        }
        self.expansion = EXPANSIONS[kind](self.hf_processor, values, hf)
        self.chat_template = chat_template(path) or (
            None if hf.chat_template else self.expansion.template
        )
        self.kind = kind
        self.token = self.expansion.token
        self._values = values
        self._blanks: dict[str, dict[str, Tensor]] = {}
        self.token_ids = [
            self.expansion.token_id,
            values.get("video_token_id") or self.expansion.token_id,
        ]  # of images, and of videos

    @cached_property
    def videos(self) -> VideoProcessor:
        """Loaded with the first video, because it needs further packages."""
        return VideoProcessor(self.kind, self.rules, self._values)

    def _load_videos(self, location: str) -> None:
        try:
            _ = self.videos
        except UserError as error:
            raise UserError(f"{location}: {error}") from error

    def placeholder(self, media: MediaReference | None = None) -> str:
        return (
            self.videos.placeholder
            if isinstance(media, VideoReference)
            else self.expansion.placeholder
        )

    def description(self, has_videos: bool) -> str:
        """The processors and their limits: pixels of an image, frames of a video."""
        size = getattr(self.hf_processor, "size", None) or {}
        limits = [f"{size[edge]:,}" for edge in ("shortest_edge", "longest_edge") if size.get(edge)]
        pixels = f", {' to '.join(limits)} pixels" if len(limits) == 2 else ""
        videos = f"; videos by {self.videos.description}" if has_videos else ""
        return f"images by {type(self.hf_processor).__name__}{pixels}{videos}"

    def key(self) -> str:
        values = [
            self.kind,
            type(self.hf_processor).__name__,
            self.hf_processor.to_dict(),
            str(self.root),
        ]
        values += [
            self.expansion.values.get(name)
            for name in ("image_seq_length", "image_seq_len", "patch_size")
        ]
        values += [] if self.max_image_tokens is None else [self.max_image_tokens]
        rules = self.rules
        video_config = read_json_file(self.rules.processor_path, "video_preprocessor_config.json")
        videos = (
            rules.fps,
            rules.max_frames,
            video_config or self.expansion.values.get("video_processor"),
        )
        values += [videos] if any(videos) else []
        return hash_of([*values, self.chat_template])

    def references(self, named: Iterable[tuple[str, Any]], location: str) -> list[MediaReference]:
        named = self.fetched(named, location)
        if any(kind == "audio" for kind, _ in named):
            raise UserError(
                f"{location}: the record has audio, and {self.kind} has no tower for audio: remove it, or train one "
                f"of {', '.join(AUDIO_RULES)}"
            )
        references: list[MediaReference] = [
            (refer_video if kind == "video" else refer)(raw, self.root, location)
            for kind, raw in named
        ]
        if any(isinstance(item, VideoReference) for item in references):
            self._load_videos(location)
        limit = self.expansion.images_in_sample
        if limit is not None and len(references) > limit:
            raise UserError(
                f"{location}: the record has {len(references)} images, and {self.kind} is supported with {limit} in a "
                "sample: split the record"
            )
        return references

    def text(self, media: MediaReference) -> str:
        if isinstance(media, VideoReference):
            return self.videos.text(media)
        return self._measured(self.expansion.text, media)

    def tokens(self, media: MediaReference) -> int:
        if isinstance(media, VideoReference):
            return self.videos.tokens(media)
        return self._measured(self.expansion.count, media)

    def grid(self, image: ImageReference) -> Grid | None:
        """Frames, height and width in patches; None where positions have one axis."""
        return self._measured(self.expansion.grid, image)

    def _measured(self, rule: Any, image: MediaReference) -> Any:
        assert isinstance(image, ImageReference), image
        try:
            return rule(image.height, image.width)
        except PROCESSOR_ERRORS as error:
            raise _unusable_image(image, error) from error

    @property
    def has_grids(self) -> bool:
        return self.expansion.grid(64, 64) is not None

    def positions(self, tokens: np.ndarray, media: Sequence[MediaReference]) -> Positions:
        image, video = self.token_ids
        types = np.where(tokens == image, IMAGE, np.where(tokens == video, VIDEO, TEXT))
        videos = [
            item for item in media if isinstance(item, VideoReference) and self._is_video(item)
        ]
        return mrope_positions(
            types,
            [
                grid
                for item in _pictures(media)
                if not self._is_video(item)
                for grid in self._grids(item)
            ],
            [self._grids(item)[0] for item in videos],
            merge=self.hf_processor.merge_size,
            time_steps=[self.videos.time_step(item) for item in videos],
            split_frames=bool(videos) and self.videos.splits_frames,
        )

    def pixels(self, media: Sequence[MediaReference]) -> dict[str, Tensor]:
        """The tensors of all ``media``, in their order, under the names of transformers' ``get_image_features``.

        Those of videos are under the names of ``get_video_features`` where videos have a separate token. Images
        of other ranks are not decoded: their patches are left out, and whole images are zeros.
        """
        pictures = _pictures(media)
        parts = [
            self._part(item, is_local)
            for item, is_local in zip(pictures, self._own(pictures), strict=True)
        ]
        return join_media(parts)

    def _is_video(self, item: MediaReference) -> bool:
        """Whether the model treats it as a video; some families treat a video as a sequence of images."""
        return isinstance(item, VideoReference) and self.videos.has_own_token

    def _grids(self, item: Picture) -> list[Any]:
        return self.videos.grids(item) if isinstance(item, VideoReference) else [self.grid(item)]

    def _own(self, media: Sequence[Picture]) -> list[list[bool]]:
        """Of each grid or tile whether this rank encodes it: shared out as the tower does it, images before videos."""
        rank, ranks = self.share or (0, 1)
        undivided = not self.has_grids and any(map(self._is_video, media))
        if ranks == 1 or undivided:
            return [[True]] * len(media)
        sizes = [self._sizes(item) for item in media]
        order = sorted(range(len(media)), key=lambda index: self._is_video(media[index]))
        owners = iter(share_out([size for index in order for size in sizes[index]], ranks))
        is_local = {index: [next(owners) == rank for _ in sizes[index]] for index in order}
        return [is_local[index] for index in range(len(media))]

    def _sizes(self, item: Picture) -> list[int]:
        """The work for each grid, in proportion to its patches, or 1 for each tile, because tiles have equal sizes."""
        if self.has_grids:
            return [math.prod(grid) for grid in self._grids(item)]
        if isinstance(item, VideoReference):
            return [1] * len(self.videos.blank(item)["pixel_values"])
        return (
            [self.tokens(item)]
            if self.expansion.has_patches
            else [1] * self._measured(self.expansion.tiles, item)
        )

    def _part(self, item: Picture, is_local: list[bool]) -> dict[str, Tensor]:
        """The tensors of one image or video; of patches, only those of the grids that this rank encodes."""
        if all(is_local) or (any(is_local) and not self.has_grids):
            return (
                self.videos.pixels(item)
                if isinstance(item, VideoReference)
                else self._processed(item, decode(item))
            )
        if not self.has_grids:
            return (
                self.videos.blank(item) if isinstance(item, VideoReference) else self._blank(item)
            )
        name = "video" if self._is_video(item) else "image"
        grids = self._grids(item)
        tensors = {f"{name}_grid_thw": torch.tensor(grids)}
        if any(is_local):
            all_tensors = self._part(item, [])
            pixels = next(name for name in all_tensors if name.startswith("pixel_values"))
            patches = all_tensors[pixels].split([math.prod(grid) for grid in grids])
            tensors[pixels] = torch.cat(
                [
                    part
                    for part, is_encoded_here in zip(patches, is_local, strict=True)
                    if is_encoded_here
                ]
            )
        return tensors

    def _blank(self, image: ImageReference) -> dict[str, Tensor]:
        """Tensors in place of an image that another rank encodes: zeros in the shape of its tiles, or only its grid.

        Images that expand to the same text share them, because they have the same number of tiles or patches.
        ``image_sizes`` and grids may then be those of another image; only the rank that encodes an image reads them.
        """
        from PIL import Image

        text = self.text(image)
        if text not in self._blanks:
            if len(self._blanks) == MAX_BLANKS:
                self._blanks.clear()
            tensors = self._processed(image, Image.new("RGB", (image.width, image.height)))
            pixels = [name for name in tensors if name.startswith("pixel")]
            zeros = (
                {}
                if self.expansion.has_patches
                else {name: zeros_without_memory(tensors[name]) for name in pixels}
            )
            self._blanks[text] = {
                name: value for name, value in tensors.items() if name not in pixels
            } | zeros
        return self._blanks[text]

    def _processed(self, image: ImageReference, decoded: "Image.Image") -> dict[str, Tensor]:
        try:
            outputs = self.hf_processor(decoded, return_tensors="pt", **self.expansion.arguments)
        except PROCESSOR_ERRORS as error:
            raise _unusable_image(image, error) from error
        tensors = {name: torch.as_tensor(outputs[name]) for name in _TENSORS if name in outputs}
        if self.kind in BY_SAMPLE:  # of one sample
            tensors = {name: value[0] for name, value in tensors.items()}
        return tensors


def join_media(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors of several images or videos, one after another."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: _join_padded([part[name] for part in parts if name in part]) for name in names}


def _join_padded(parts: list[Tensor]) -> Tensor:
    """One after another; images that differ in size are padded with zeros, as transformers pads them."""
    shape = [max(sizes) for sizes in zip(*(part.shape[1:] for part in parts), strict=True)]
    return torch.cat(
        [part if list(part.shape[1:]) == shape else _pad_images(part, shape) for part in parts]
    )


def _pad_images(part: Tensor, shape: list[int]) -> Tensor:
    padded = part.new_zeros(len(part), *shape)
    padded[tuple(slice(size) for size in part.shape)] = part
    return padded


def _unusable_image(image: ImageReference, error: Exception) -> UserError:
    return UserError(
        f"{image.where}: the image {shown(image.source)} with {image.width}x{image.height} pixels cannot be used "
        f"({one_line(error)}): change its size, remove the record, or check the files of the image processor"
    )
