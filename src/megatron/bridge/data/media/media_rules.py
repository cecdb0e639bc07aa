# SPDX-License-Identifier: Apache-2.0
"""How images and videos are read and processed. This module imports no torch."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megatron.bridge.utils.errors import UserError, one_line

FILES = ("preprocessor_config.json", "processor_config.json")
"""Files of a checkpoint that say how images are processed; one of them is there."""


def has_processor(path: str) -> bool:
    """Whether a directory has the files of an image processor; of a hub id it is assumed."""
    folder = Path(path).expanduser()
    return not folder.exists() or any((folder / name).is_file() for name in FILES)


PROCESSOR_ERRORS = (
    ArithmeticError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What transformers' processors raise for files with values of a wrong type or range."""


@contextmanager
def loading(path: str, part: str) -> Iterator[None]:
    """Turn what transformers raises into an error that says that the checkpoint has no ``part``."""
    try:
        yield
    except PROCESSOR_ERRORS as error:
        raise UserError(
            f"dataset.hf_processor_path={path} has no {part} ({one_line(error)}): give the directory or hub id of a "
            "vision-language model"
        ) from error


@dataclass(frozen=True)
class MediaRules:
    """How images and videos are read and processed."""

    processor_path: str  # directory or hub id of the checkpoint whose processor is used
    root: str  # folder that the paths of images start from and stay in
    min_pixels: int | None = (
        None  # images with fewer pixels are enlarged; None: as the checkpoint says
    )
    max_pixels: int | None = (
        None  # images with more pixels are shrunk; None: as the checkpoint says
    )
    max_image_tokens: int | None = None  # that a sample may have; None: any number
    fetches: bool = False  # whether addresses on the network are downloaded
    fps: float | None = (
        None  # frames of a second of video that are used; None: as the checkpoint says
    )
    max_frames: int | None = None  # of a video; None: as the checkpoint says
