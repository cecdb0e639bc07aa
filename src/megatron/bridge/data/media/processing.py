# SPDX-License-Identifier: Apache-2.0
"""Images and videos as a model takes them: expanded placeholders before tokenizing, pixels when a batch is made.

Pixels are computed by transformers' processors of the checkpoint. Its composite processor is not called: it would
decode images in order to count tokens, and would lose which characters belong to an answer.
"""

import hashlib
import http.client
import json
import math
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from megatron.bridge.data.media.expansion import EXPANSIONS, Grid
from megatron.bridge.data.media.media_rules import PROCESSOR_ERRORS, MediaRules, loading
from megatron.bridge.data.media.positions import IMAGE, TEXT, VIDEO, Positions, mrope_positions
from megatron.bridge.data.media.references import (
    ImageReference,
    MediaReference,
    VideoReference,
    decode,
    refer,
    shown,
)
from megatron.bridge.data.media.videos import VideoProcessor, refer_video, zeros_without_memory
from megatron.bridge.models.vision.media import share_out
from megatron.bridge.utils import strict_json
from megatron.bridge.utils.atomic import published_file
from megatron.bridge.utils.errors import UserError, one_line

if TYPE_CHECKING:
    from PIL import Image
    from transformers import PreTrainedTokenizerBase


_DEFAULTS = {"max_num_tiles": 12, "use_thumbnail": True, "patch_size": 16, "downsample_ratio": 0.5}


class TileProcessor:
    """Splits an image into a grid of tiles with the closest aspect ratio, followed by the whole image as one tile.

    This is what the remote code of Nemotron Nano VL v2 computes, which need not run.
    """

    def __init__(self, values: Mapping[str, Any], path: str) -> None:
        self.values: dict[str, Any] = {
            "image_size": values.get("force_image_size", 512),
            **_DEFAULTS,
        }
        self.values |= {
            key: values[key] for key in (*self.values, "norm_mean", "norm_std") if key in values
        }
        if missing := sorted({"norm_mean", "norm_std"} - self.values.keys()):
            raise UserError(
                f"{path}: preprocessor_config.json has no {missing[0]}: download it again"
            )

    def to_dict(self) -> dict[str, Any]:
        return self.values

    def count(self, height: int, width: int) -> int:
        """Tiles of an image of this size."""
        rows, columns = self._grid(height, width)
        return rows * columns + (self.values["use_thumbnail"] and rows * columns > 1)

    @property
    def tokens(self) -> int:
        return int(
            (
                self.values["image_size"]
                // self.values["patch_size"]
                * self.values["downsample_ratio"]
            )
            ** 2
        )

    def __call__(self, image: "Image.Image", return_tensors: str = "pt") -> dict[str, Tensor]:
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None] / 255
        (rows, columns), side = self._grid(image.height, image.width), self.values["image_size"]
        grid = _resize_image(pixels, rows * side, columns * side)[0]
        tiles = (
            grid.unflatten(2, (columns, side))
            .unflatten(1, (rows, side))
            .permute(1, 3, 0, 2, 4)
            .flatten(0, 1)
        )
        if len(tiles) < self.count(image.height, image.width):
            tiles = torch.cat((tiles, _resize_image(pixels, side, side)))
        mean, deviation = (
            torch.tensor(self.values[key]).view(3, 1, 1) for key in ("norm_mean", "norm_std")
        )
        return {"pixel_values": (tiles - mean) / deviation}

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns."""
        from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import (
            get_optimal_tiled_canvas,
        )

        tile = (self.values["image_size"],) * 2
        columns, rows = get_optimal_tiled_canvas(
            (height, width), tile, 1, self.values["max_num_tiles"]
        )
        return rows, columns


def _resize_image(image: Tensor, height: int, width: int) -> Tensor:
    return interpolate(image, (height, width), mode="bicubic", align_corners=False, antialias=True)


FOLDER = ".fetched"  # below the root of the media
MAX_BYTES = 200_000_000
_SECONDS = 30  # without an answer
_SCHEMES = ("http://", "https://")


def fetched(raw: Any, root: Path, location: str) -> Any:
    """A record's image or video reference, with URLs replaced by downloaded paths below ``root``."""
    if isinstance(raw, Mapping):
        return {key: fetched(value, root, location) for key, value in raw.items()}
    if isinstance(raw, list):
        return [fetched(value, root, location) for value in raw]
    if not isinstance(raw, str) or not raw.startswith(_SCHEMES):
        return raw
    name = (
        hashlib.blake2b(raw.encode(), digest_size=16).hexdigest()
        + Path(urlsplit(raw).path).suffix[:8]
    )
    path = root / FOLDER / name
    if not path.is_file():
        content = _download_media(raw, location)
        try:
            path.parent.mkdir(exist_ok=True)
            with published_file(path) as aside:
                aside.write_bytes(content)
        except OSError as error:
            raise UserError(
                f"{location}: {raw} cannot be kept in {path.parent} ({error}): set dataset.media_root"
            ) from error
    return f"{FOLDER}/{name}"


def _download_media(address: str, location: str) -> bytes:
    request = urllib.request.Request(address, headers={"User-Agent": "megatron-bridge"})
    try:
        with urllib.request.urlopen(request, timeout=_SECONDS) as response:
            content: bytes = response.read(MAX_BYTES + 1)
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise UserError(
            f"{location}: {address} cannot be downloaded ({one_line(error)}): correct it, or remove the record"
        ) from error
    if len(content) > MAX_BYTES:
        raise UserError(
            f"{location}: {address} has more than {MAX_BYTES:,} bytes: download it, and give its path"
        )
    return content


_REMOTE = ("NemotronH_Nano_VL_V2",)
"""Models whose config and image processor are remote code, which need not run."""
BY_SAMPLE = ("idefics3", "smolvlm")
"""Families in which transformers' tensors are [samples, tiles, ...]."""
MAX_BLANKS = 1024  # cached tensors that stand for images of other ranks
_TENSORS = (
    "pixel_values",
    "image_grid_thw",
    "image_grid_hw",
    "image_sizes",
    "pixel_attention_mask",
)


class MediaProcessor:
    """The images and videos of a run; the special tokens of the tokenizer ``hf`` are the placeholders."""

    def __init__(self, rules: MediaRules, hf: "PreTrainedTokenizerBase") -> None:
        self.root = Path(rules.root)
        self.max_image_tokens = rules.max_image_tokens
        self.share: tuple[int, int] | None = (0, 1)
        """See ``DatasetRequest.image_share``."""
        path = rules.processor_path
        config = _read_config(path)
        kind = config.get("model_type", "")
        if kind not in EXPANSIONS:
            raise UserError(
                f"dataset.hf_processor_path={path} is a {kind or 'model without model_type'}: images are "
                f"supported for {', '.join(EXPANSIONS)}"
            )
        self.hf_processor = _image_processor(path, rules, config if kind in _REMOTE else None)
        processor_config = _read_json_file(path, "processor_config.json")
        values = {
            **config,
            **{key: value for key, value in processor_config.items() if value is not None},
        }
        self.expansion = EXPANSIONS[kind](self.hf_processor, values, hf)
        self.chat_template = chat_template(path) or (
            None if hf.chat_template else self.expansion.template
        )
        self.kind = kind
        self._rules, self._values = rules, values
        self._blanks: dict[str, dict[str, Tensor]] = {}
        self.token_ids = [
            self.expansion.token_id,
            values.get("video_token_id") or self.expansion.token_id,
        ]
        """The tokens whose embeddings features of the tower replace: of images, and of videos."""

    @cached_property
    def videos(self) -> VideoProcessor:
        """Loaded with the first video, because it needs further packages."""
        return VideoProcessor(self.kind, self._rules, self._values)

    def _load_videos(self, location: str) -> None:
        try:
            _ = self.videos
        except UserError as error:
            raise UserError(f"{location}: {error}") from error

    def placeholder(self, media: MediaReference | None = None) -> str:
        """The text that a chat template writes for a video or an image."""
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
        """A hash of everything that the tokens of an image depend on."""
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
        rules, video_config = (
            self._rules,
            _read_json_file(self._rules.processor_path, "video_preprocessor_config.json"),
        )
        videos = (
            rules.fps,
            rules.max_frames,
            video_config or self.expansion.values.get("video_processor"),
        )
        values += [videos] if any(videos) else []
        text = json.dumps([*values, self.chat_template], sort_keys=True, default=str)
        return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()

    def references(self, named: Iterable[tuple[str, Any]], location: str) -> list[MediaReference]:
        """References to what a record names: ``image`` or ``video``, and what it says about it."""
        if self._rules.fetches:
            named = [(kind, fetched(raw, self.root, location)) for kind, raw in named]
        references = [
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
        """The text that replaces the placeholder of ``media``."""
        if isinstance(media, VideoReference):
            return self.videos.text(media)
        return self._measured(self.expansion.text, media)

    def tokens(self, media: MediaReference) -> int:
        """Number of tokens of ``media`` that features replace."""
        if isinstance(media, VideoReference):
            return self.videos.tokens(media)
        return self._measured(self.expansion.count, media)

    def total_tokens(self, media: Iterable[MediaReference]) -> int:
        """Number of tokens of all ``media`` that features replace."""
        return sum(map(self.tokens, media))

    def grid(self, image: ImageReference) -> Grid | None:
        """Frames, height and width in patches; None where positions have one axis."""
        return self._measured(self.expansion.grid, image)

    def _measured(self, rule: Any, image: ImageReference) -> Any:
        try:
            return rule(image.height, image.width)
        except PROCESSOR_ERRORS as error:
            raise _unusable_image(image, error) from error

    @property
    def has_grids(self) -> bool:
        """Whether positions have three axes."""
        return self.expansion.grid(64, 64) is not None

    def positions(self, tokens: np.ndarray, media: Sequence[MediaReference]) -> Positions:
        """Return positions [3, sequence] of the tokens of one sample."""
        image, video = self.token_ids
        types = np.where(tokens == image, IMAGE, np.where(tokens == video, VIDEO, TEXT))
        videos = [
            item for item in media if isinstance(item, VideoReference) and self._is_video(item)
        ]
        return mrope_positions(
            types,
            [grid for item in media if not self._is_video(item) for grid in self._grids(item)],
            [self._grids(item)[0] for item in videos],
            merge=self.hf_processor.merge_size,
            time_steps=[self.videos.time_step(item) for item in videos],
            split_frames=bool(videos) and self.videos.splits_frames,
        )

    def pixels(self, media: Sequence[MediaReference]) -> dict[str, Tensor]:
        """The tensors of all ``media``, in their order, under the names of transformers' ``get_image_features``.

        Those of videos are under the names of ``get_video_features`` where videos have a token of their own. Images
        of other ranks are not decoded: their patches are left out, and whole images are zeros.
        """
        parts = [
            self._part(item, is_local)
            for item, is_local in zip(media, self._own(media), strict=True)
        ]
        return join_media(parts)

    def _is_video(self, item: MediaReference) -> bool:
        """Whether the model treats it as a video; some families treat a video as a sequence of images."""
        return isinstance(item, VideoReference) and self.videos.has_own_token

    def _grids(self, item: MediaReference) -> list[Any]:
        return self.videos.grids(item) if isinstance(item, VideoReference) else [self.grid(item)]

    def _own(self, media: Sequence[MediaReference]) -> list[list[bool]]:
        """Of each grid or tile whether this rank encodes it: shared out as the tower does it, images before videos."""
        rank, ranks = self.share or (0, 1)
        if ranks == 1:
            return [[True]] * len(media)
        sizes = [self._sizes(item) for item in media]
        order = sorted(range(len(media)), key=lambda index: self._is_video(media[index]))
        owners = iter(share_out([size for index in order for size in sizes[index]], ranks))
        is_local = {index: [next(owners) == rank for _ in sizes[index]] for index in order}
        return [is_local[index] for index in range(len(media))]

    def _sizes(self, item: MediaReference) -> list[int]:
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

    def _part(self, item: MediaReference, is_local: list[bool]) -> dict[str, Tensor]:
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
        name, grids = ("video" if self._is_video(item) else "image"), self._grids(item)
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


def _read_config(path: str) -> Mapping[str, Any]:
    from transformers import AutoConfig

    with loading(path, "config.json that can be read"):
        raw = _read_json_file(path, "config.json")
        return (
            raw if raw.get("model_type") in _REMOTE else AutoConfig.from_pretrained(path).to_dict()
        )


def _image_processor(path: str, rules: MediaRules, remote: Mapping[str, Any] | None) -> Any:
    from transformers import AutoImageProcessor

    with loading(path, "image processor that can be loaded"):
        processor: Any = (
            AutoImageProcessor.from_pretrained(path)
            if remote is None
            else TileProcessor(
                {**remote, **_read_json_file(path, "preprocessor_config.json")}, path
            )
        )
    _limit_pixels(processor, "shortest_edge", rules.min_pixels, "min_pixels")
    _limit_pixels(processor, "longest_edge", rules.max_pixels, "max_pixels")
    return processor


def _limit_pixels(processor: Any, edge: str, value: int | None, name: str) -> None:
    """Set the minimum or maximum number of pixels of an image, which Qwen's and GLM's processors call an edge."""
    if value is None:
        return
    if not hasattr(processor, "merge_size"):
        raise UserError(
            f"dataset.{name}={value}: {type(processor).__name__} has no such limit, its images have fixed sizes: "
            "leave it unset"
        )
    from transformers.image_utils import SizeDict

    processor.size = SizeDict(**{**dict(processor.size), edge: value})
    minimum, maximum = processor.size["shortest_edge"], processor.size["longest_edge"]
    if minimum > maximum:
        raise UserError(
            f"dataset.{name}={value} contradicts the other limit: images would have {minimum} pixels at least and "
            f"{maximum} at most: set dataset.min_pixels and dataset.max_pixels"
        )


def chat_template(path: str) -> str | None:
    """The processor's template, which takes precedence over the tokenizer's; None if it has none."""
    text = _read_text_file(path, "chat_template.jinja")
    if text is not None:
        return text
    template = _read_json_file(path, "chat_template.json").get("chat_template")
    return template if isinstance(template, str) else None


def _read_json_file(path: str, name: str) -> Mapping[str, Any]:
    text = _read_text_file(path, name)
    if text is None:
        return {}
    try:
        content = strict_json.loads(text)
    except ValueError as error:
        raise UserError(f"{path}/{name} is not valid JSON ({error}): download it again") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}/{name} is not a JSON object: download it again")
    return content


def _read_text_file(path: str, name: str) -> str | None:
    """The content of a file of a checkpoint; None if there is no such file."""
    from transformers.utils.hub import cached_file

    file = cached_file(
        path,
        name,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return Path(file).read_text(encoding="utf-8") if file else None
