# SPDX-License-Identifier: Apache-2.0
"""The videos of a run: which frames are used, the text in their place, and their pixels.

Transformers' own processor does all of it. To count tokens it runs on the meta device, on a video without pixels.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from megatron.bridge.data.media.expansion import GEMMA4, GLM, QWEN, Grid
from megatron.bridge.data.media.media_rules import PROCESSOR_ERRORS, MediaRules, loading
from megatron.bridge.data.media.references import MAX_PIXELS as MAX_IMAGE_PIXELS
from megatron.bridge.data.media.references import (
    ImageReference,
    VideoReference,
    decode,
    open_file,
    refer,
    shown,
    source_of,
    unreadable,
)
from megatron.bridge.utils.errors import UserError, one_line

SUPPORTED = (*QWEN, *GEMMA4, *GLM, "internvl", "smolvlm")
_EXTRA = "uv pip install 'hf-megatron-bridge[vlm]'"
MAX_FRAMES = 1_000_000  # a file with more frames is refused
MAX_PIXELS = 2_000_000_000  # of the frames that are used: more would take more than 6 GB to decode


class VideoProcessor:
    """Transformers' processor of a ``model_type``, whose videos' frames are images or have a separate token."""

    def __init__(self, kind: str, rules: MediaRules, values: Any) -> None:
        self.processor = _load_processor(kind, rules)
        self.placeholder: str = self.processor.video_token
        self.has_own_token = kind in (*QWEN, *GEMMA4)
        """Whether other tokens stand for videos than for images; if not, a video is a row of images."""
        self._names: tuple[str, ...] = ("pixel_values_videos", "video_grid_thw")
        if kind in GEMMA4:
            self._names = ("pixel_values_videos", "video_position_ids", "num_frames_per_video")
        self.splits_frames = kind.startswith("qwen3")
        self._token: str = self.placeholder if self.has_own_token else self.processor.image_token
        self._per_second: float | None = (
            values["vision_config"]["tokens_per_second"] if kind == "qwen2_5_vl" else None
        )
        self._sized: dict[tuple[Any, ...], Any] = {}

    @property
    def description(self) -> str:
        """The processor, and which frames it uses."""
        hf_processor = self.processor.video_processor
        if not hf_processor.do_sample_frames:
            return f"{type(hf_processor).__name__}, all frames"
        frame_limit = getattr(hf_processor, "max_frames", None) or getattr(
            hf_processor, "num_frames", None
        )
        chosen = [f"{hf_processor.fps:g} frames per second"] if hf_processor.fps else []
        return ", ".join(
            [
                type(hf_processor).__name__,
                *chosen,
                *([f"at most {frame_limit:,} frames"] if frame_limit else []),
            ]
        )

    def text(self, video: VideoReference) -> str:
        inputs = self._without_pixels(video)
        with _video_errors(video):
            return self.processor.replace_video_token(inputs, 0)

    def tokens(self, video: VideoReference) -> int:
        return self.text(video).count(self._token)

    def grids(self, video: VideoReference) -> list[Grid]:
        """Frames, height and width in patches, of the video or of each of its frames that is an image."""
        grid_thw = self._without_pixels(video).get("video_grid_thw")
        if grid_thw is None:
            return []
        frames, height, width = grid_thw[0].tolist()
        return [(frames, height, width)] if self.has_own_token else [(1, height, width)] * frames

    def time_step(self, video: VideoReference) -> float:
        """Positions from one frame of the grid to the next."""
        if self._per_second is None:
            return 1.0
        metadata = self._without_pixels(video)["video_metadata"][0]
        return (
            self._per_second
            * self.processor.video_processor.temporal_patch_size
            / metadata.sampled_fps
        )

    def frames(self, video: VideoReference) -> list[int]:
        """The numbers of the frames that are used."""
        return [
            int(index) for index in self._without_pixels(video)["video_metadata"][0].frames_indices
        ]

    def pixels(self, video: VideoReference) -> dict[str, Tensor]:
        """Tensors of the video under the names of transformers' ``get_video_features``, or of images."""
        return self._tensors(
            video, self._processed(video, decode_frames(video, self.frames(video)), False)
        )

    def blank(self, video: VideoReference) -> dict[str, Tensor]:
        """Zeros of the shapes of ``pixels``."""
        tensors = self._tensors(video, self._without_pixels(video))
        return {name: zeros_without_memory(value) for name, value in tensors.items()}

    def _tensors(self, video: VideoReference, outputs: Any) -> dict[str, Tensor]:
        if self.has_own_token:
            return {name: torch.as_tensor(outputs[name]) for name in self._names}
        if "video_grid_thw" in outputs:
            return {
                "pixel_values": outputs["pixel_values_videos"],
                "image_grid_thw": torch.tensor(self.grids(video)),
            }
        names = ("pixel_values_videos", "pixel_values", "pixel_attention_mask")
        return {name.removesuffix("_videos"): outputs[name][0] for name in names if name in outputs}

    def _without_pixels(self, video: VideoReference) -> Any:
        """What the processor makes of a video of this size."""
        listed = isinstance(video.source, list)
        key = (video.frames, video.fps, video.height, video.width, listed)
        if key not in self._sized:
            empty = torch.empty(
                video.frames, 3, video.height, video.width, dtype=torch.uint8, device="meta"
            )
            outputs = self._processed(video, empty, False if listed else None)
            used = len(outputs["video_metadata"][0].frames_indices)
            if used * video.height * video.width > MAX_PIXELS:
                raise UserError(
                    f"{video.where}: {used:,} frames of {_video_name(video)} with "
                    f"{video.width}x{video.height} pixels are "
                    f"more than {MAX_PIXELS:,} pixels: set dataset.fps and dataset.max_frames, or make it smaller"
                )
            self._sized[key] = outputs
        return self._sized[key]

    def _processed(self, video: VideoReference, frames: Tensor, sample: bool | None) -> Any:
        """The processor's tensors; ``sample`` None leaves it to the processor whether it chooses among frames."""
        from transformers.video_utils import VideoMetadata

        metadata = VideoMetadata(
            video.frames,
            video.fps,
            video.width,
            video.height,
            video.frames / video.fps,
            None,
            list(range(video.frames)),
        )
        options = {} if sample is None else {"do_sample_frames": sample}
        with _video_errors(video):
            return self.processor.video_processor(
                frames,
                video_metadata=metadata,
                return_metadata=True,
                return_tensors="pt",
                **options,
            )


@contextmanager
def _video_errors(video: VideoReference) -> Iterator[None]:
    """Convert errors of transformers' processor to one sentence about the video."""
    try:
        yield
    except PROCESSOR_ERRORS as error:
        raise UserError(
            f"{video.where}: {_video_name(video)} with {video.frames} frames of {video.width}x{video.height} pixels at "
            f"{video.fps:g} frames per second cannot be used ({one_line(error)}): change it, remove the record, or "
            "check the files of the video processor"
        ) from error


def zeros_without_memory(like: Tensor) -> Tensor:
    """Zeros on the CPU with the shape and dtype of ``like``; all of them are the same element in memory."""
    return torch.zeros((), dtype=like.dtype).expand(like.shape)


def refer_video(raw: Any, root: Path, location: str) -> VideoReference:
    """The reference to a video that a record names, once its size is read.

    ``raw`` is what ``references.refer`` takes, or ``{"frames": [images], "fps": rate}``. Relative paths start from
    ``root``, and files outside of it are refused; ``location`` names the record in messages.
    """
    if isinstance(raw, dict) and "frames" in raw:
        return _refer_frames(raw["frames"], raw.get("fps"), root, location)
    source = source_of(raw, root, location, "video")
    with _open_video(source, location) as container:
        stream = _picture_stream(container)
        # some containers do not say how many frames they have
        frames = stream.frames or sum(packet.size > 0 for packet in container.demux(stream))
        rate = float(stream.average_rate or 0)
        video = VideoReference(source, stream.height, stream.width, location, frames, rate)
    if not 0 < video.frames <= MAX_FRAMES or not video.fps or not video.height or not video.width:
        raise UserError(
            f"{location}: {_video_name(video)} has {video.frames:,} frames of {video.width}x{video.height} pixels at "
            f"{video.fps:g} frames per second, which cannot be used: encode it again"
        )
    return video


def _refer_frames(frames: Any, fps: Any, root: Path, location: str) -> VideoReference:
    if not isinstance(frames, list) or not frames:
        raise UserError(f"{location}: the frames of a video are {frames!r}: give a list of images")
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps < 1000:
        raise UserError(
            f"{location}: a video that is a list of frames has fps={fps!r}: say how many there are per second"
        )
    images = [refer(frame, root, location) for frame in frames]
    sizes = sorted({(image.width, image.height) for image in images})
    if len(sizes) > 1:
        raise UserError(
            f"{location}: the frames of a video have the sizes {sizes[0]} and {sizes[1]}: give them one size"
        )
    first = images[0]
    return VideoReference(
        [image.source for image in images], *first[1:3], location, len(images), float(fps)
    )


def decode_frames(video: VideoReference, numbers: Sequence[int]) -> Tensor:
    """The frames [numbers, 3, height, width], uint8."""
    if isinstance(video.source, list):
        frames = {index: _of_image(video, index) for index in set(numbers)}
    else:
        frames = _decode_numbers(video, set(numbers))
    if missing := sorted(set(numbers) - set(frames)):
        raise UserError(
            f"{video.where}: {_video_name(video)} ends before its frame {missing[0]}, and had {video.frames} when the "
            "sample was made: restore it, or remove the record"
        )
    return torch.from_numpy(np.stack([frames[index] for index in numbers])).permute(0, 3, 1, 2)


def _of_image(video: VideoReference, index: int) -> np.ndarray:
    return np.asarray(
        decode(ImageReference(video.source[index], video.height, video.width, video.where))
    )


def _decode_numbers(video: VideoReference, numbers: set[int]) -> dict[int, np.ndarray]:
    pixels: dict[int, np.ndarray] = {}
    with _open_video(str(video.source), video.where) as container:
        stream = _picture_stream(container)
        for index, frame in enumerate(container.decode(stream)):
            if index in numbers:
                if (frame.width, frame.height) != (video.width, video.height):
                    raise ValueError(
                        f"its frame {index} has {frame.width}x{frame.height} pixels instead of "
                        f"{video.width}x{video.height}"
                    )
                pixels[index] = frame.to_ndarray(format="rgb24")
            if index >= max(numbers):
                break
    return pixels


@contextmanager
def _open_video(source: str, location: str) -> Iterator[Any]:
    """Open a video file with PyAV, and convert errors to one sentence, also those while it is read.

    FFmpeg gets the content of one file and no name. By default it would choose among hundreds of
    demuxers by the content, and some (hls, concat, dash, sdp, image2, ...) open further files and
    addresses, which the content names, or listen on a port.
    """
    av = _import_av(location)
    try:
        with open_file(source, location) as file:
            name = _container_format(file)
            with av.open(file, format=name, options=_OPTIONS, io_open=_refuse_further) as container:
                yield container
    except (av.error.FFmpegError, OSError, ValueError, RuntimeError, MemoryError) as error:
        raise unreadable("video", source, location, error) from error


CONTAINERS = "mp4, mov, mkv, webm, avi or gif"
"""The formats of files that are read."""
_OPTIONS = {
    "format_whitelist": "mov,mp4,matroska,webm,avi,gif",
    "protocol_whitelist": "none",  # not even files; ``av.open`` gets an open one
    "max_pixels": str(MAX_IMAGE_PIXELS),  # of one frame, checked by the decoder
}
_BOXES = (b"ftyp", b"moov", b"mdat", b"moof", b"styp", b"free", b"skip", b"wide", b"pnot")
"""The kinds of the first part of an mp4 or mov file, behind its length of four bytes."""


def _container_format(file: IO[bytes]) -> str:
    """Return FFmpeg's name of the container format, from the first bytes of the file."""
    head = file.read(12)
    file.seek(0)
    if head[4:8] in _BOXES:
        return "mov"
    if head.startswith(b"\x1a\x45\xdf\xa3"):
        return "matroska"
    if head.startswith(b"RIFF") and head[8:] == b"AVI ":
        return "avi"
    if head.startswith((b"GIF87a", b"GIF89a")):
        return "gif"
    raise ValueError(f"it is not {CONTAINERS}")


def _refuse_further(address: str, flags: int, options: Any) -> Any:
    """Refuse what a video file names besides its own content."""
    raise ValueError(f"it names another file, {address!r:.100}")


def _picture_stream(container: Any) -> Any:
    """Return the first stream of pictures, which FFmpeg must have a decoder for."""
    if not container.streams.video:
        raise ValueError("it has no pictures")
    stream = container.streams.video[0]
    if stream.codec_context is None:
        raise ValueError("its pictures are of an unknown kind")
    return stream


def _import_av(location: str) -> Any:
    try:
        import av  # pyright: ignore[reportMissingImports] - of an extra
    except ImportError as error:
        raise UserError(
            f"{location}: the record has a video, and PyAV is not installed: {_EXTRA}"
        ) from error
    return av


def _video_name(video: VideoReference) -> str:
    return "the video" if isinstance(video.source, list) else f"the video {shown(video.source)}"


def _load_processor(kind: str, rules: MediaRules) -> Any:
    """Transformers' composite processor, its video processor set as ``rules`` say."""
    from transformers import AutoProcessor
    from transformers.utils import is_torchvision_available

    path = rules.processor_path
    if kind not in SUPPORTED:
        raise UserError(
            f"the records have videos, which {kind} is not supported with, only {', '.join(SUPPORTED)}"
        )
    if not is_torchvision_available():
        raise UserError(f"the records have videos, and torchvision is not installed: {_EXTRA}")
    with loading(path, "processor for videos that can be loaded"):
        processor: Any = AutoProcessor.from_pretrained(path)
        if not hasattr(processor, "video_processor"):
            raise ValueError(f"its processor_class is {type(processor).__name__}")
    _choose_frames(
        processor.video_processor, rules, "num_frames" if kind == "smolvlm" else "max_frames"
    )
    return processor


def _choose_frames(processor: Any, rules: MediaRules, limit: str) -> None:
    """Set which frames are used; ``limit`` is what the processor calls their largest number."""
    if rules.fps is not None:
        processor.do_sample_frames = True
        processor.fps = rules.fps
        frame_limit = (
            (getattr(processor, limit, None) or MAX_FRAMES) if limit == "num_frames" else None
        )
        processor.num_frames = frame_limit  # other processors would take this number of any video
    if rules.max_frames is None:
        return
    if not hasattr(processor, limit):
        raise UserError(
            f"dataset.max_frames={rules.max_frames}: {type(processor).__name__} has no such limit: leave it unset"
        )
    if not processor.do_sample_frames:
        raise UserError(
            f"dataset.max_frames={rules.max_frames}: {type(processor).__name__} of this checkpoint takes all frames: "
            "set dataset.fps, too"
        )
    setattr(processor, limit, rules.max_frames)
