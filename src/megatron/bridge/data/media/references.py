# SPDX-License-Identifier: Apache-2.0
"""Where an image, a video or a recording is, how large it is, and the pixels of an image.

A record names a file by a path, or holds its bytes. Sizes are read from the header of the file, so samples are
tokenized and packed without decoding a pixel.
"""

import base64
import binascii
import io
import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from megatron.bridge.utils.errors import UserError, one_line
from megatron.bridge.utils.regular_files import open_regular_file

if TYPE_CHECKING:
    from PIL import Image

MAX_PIXELS = (
    100_000_000  # an image with more pixels is refused: it would take more than 300 MB to decode
)
FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
"""Those that are decoded; for PostScript, PIL would run a program."""
_DATA, _FILE = "data:", "file://"
_URLS = ("http://", "https://", "ftp://", "s3://", "gs://")
_ORIENTATION, _TURNED = 0x0112, (5, 6, 7, 8)  # of EXIF; these swap height and width


class ImageReference(NamedTuple):
    source: str  # a path, or a ``data:`` URL that holds the file
    height: int
    width: int
    where: str  # the record that it belongs to, for messages


class VideoReference(NamedTuple):
    source: str | list[str]  # as of an image; of a video that is a list of images, that of each
    height: int
    width: int
    where: str
    frames: int
    fps: float


class AudioReference(NamedTuple):
    source: str  # as of an image
    frames: int  # samples of each channel
    rate: int  # samples per second
    channels: int
    where: str

    @property
    def seconds(self) -> float:
        return self.frames / self.rate


MediaReference = ImageReference | VideoReference | AudioReference
_BY_LENGTH = {len(kind._fields): kind for kind in (ImageReference, VideoReference, AudioReference)}


def reference_of(values: Sequence[Any]) -> MediaReference:
    """The reference with these values; each kind has another number of them."""
    return _BY_LENGTH[len(values)](*values)


def refer(raw: Any, root: Path, location: str) -> ImageReference:
    """The reference to an image that a record names, once its size is read.

    ``raw`` is a path, a ``data:`` URL, bytes, a PIL image, or an object with one of them under ``image``, ``path``,
    ``url`` or ``bytes``. Relative paths start from ``root``, and images outside of it are refused; ``location`` names
    the record in messages.
    """
    source = source_of(raw, root, location, "image")
    height, width = _measure_image(source, location)
    return ImageReference(source, height, width, location)


def decode(reference: ImageReference) -> "Image.Image":
    """Decode to RGB on a white ground, and apply the EXIF orientation.

    transformers' image processors put white under transparent pixels. Its function that loads a file by name drops
    transparency instead, which shows the colors that it hid.
    """
    from PIL import ImageOps

    source = reference.source
    location = reference.where
    with _image_errors(source, location), _opened_image(source, location) as file:
        height, width = _turned_size(file)
        if (height, width) != (reference.height, reference.width):
            raise UserError(
                f"{location}: the image {shown(source)} is {width}x{height} and was "
                f"{reference.width}x{reference.height} when the sample was made: restore it, or remove the prepared "
                "samples"
            )
        return _on_white(ImageOps.exif_transpose(file))


def _on_white(image: "Image.Image") -> "Image.Image":
    from PIL import Image

    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    white = Image.new("RGBA", image.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")


def shown(source: str) -> str:
    return "in the record" if source.startswith(_DATA) else source


def source_of(raw: Any, root: Path, location: str, kind: str) -> str:
    """A path inside of ``root``, or a ``data:`` URL; ``kind`` is the word for it in messages."""
    if isinstance(raw, Mapping):
        raw = _named_source(raw, location, kind)
    if isinstance(raw, bytes | bytearray):
        return f"{_DATA};base64,{base64.b64encode(raw).decode()}"
    if hasattr(raw, "save") and hasattr(raw, "getexif"):  # an image of PIL
        return source_of(png(raw), root, location, kind)
    if not isinstance(raw, str) or not raw:
        raise UserError(
            f"{location}: the {kind} is {type(raw).__name__}: give a path, a data: URL, or the bytes of a file"
        )
    if raw.startswith(_DATA):
        return raw
    if raw.startswith(_URLS):
        raise UserError(
            f"{location}: the {kind} {raw} is on the network: download it, or set dataset.fetch_urls=true"
        )
    return str(_path_inside_root(raw.removeprefix(_FILE), root, location, kind))


def _named_source(raw: Mapping[str, Any], location: str, kind: str) -> Any:
    """The value of the first key that says where the file is; tables have both ``bytes`` and ``path``."""
    keys = ("bytes", kind, "path", "url")
    sources = {key: raw[key] for key in keys if raw.get(key) is not None}
    if not sources:
        raise UserError(
            f"{location}: the {kind} has none of {', '.join(keys)} (keys: {', '.join(raw) or 'none'})"
        )
    return next(iter(sources.values()))


def png(image: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


def _path_inside_root(name: str, root: Path, location: str, kind: str) -> Path:
    try:
        # no file is outside of the root of all files, where names are those of the command's own folder
        path = ((Path() if root == Path("/") else root) / name).resolve()
        folder = root.resolve()
        is_file = path.is_file()
    except (OSError, ValueError) as error:  # too long, or with a null byte
        reason = getattr(error, "strerror", None) or one_line(error)
        raise UserError(
            f"{location}: the {kind} path {name!r:.200} cannot be used: {reason}: correct it"
        ) from error
    if not path.is_relative_to(folder):
        raise UserError(
            f"{location}: the {kind} {name} is outside of dataset.media_root={root}: set dataset.media_root to a "
            f"folder that holds all {kind}s"
        )
    if not is_file:
        raise UserError(
            f"{location}: the {kind} {name} is not a file in dataset.media_root={root}: add it, or correct one of both"
        )
    return path


def _measure_image(source: str, location: str) -> tuple[int, int]:
    """Height and width, as they are after turning."""
    with _image_errors(source, location), _opened_image(source, location) as image:
        height, width = _turned_size(image)
    if width * height > MAX_PIXELS:
        raise _too_large(source, location, f"{width}x{height}")
    return height, width


def _turned_size(image: "Image.Image") -> tuple[int, int]:
    """Height and width, as they are after turning; no pixel is decoded."""
    width, height = image.size
    # a PNG is decoded as a whole to look for EXIF behind its pixels, and PIL turns the size of a TIFF itself
    has_exif = "exif" in image.info if image.format == "PNG" else image.format != "TIFF"
    if has_exif and image.getexif().get(_ORIENTATION) in _TURNED:
        return width, height
    return height, width


@contextmanager
def _image_errors(source: str, location: str) -> Generator[None]:
    """Convert PIL's errors to one sentence about the image."""
    from PIL import Image

    try:
        yield
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        # of PIL's own limit, about 179 million pixels, which is state of the entire process
        pixels = re.search(r"\d+", str(error))
        raise _too_large(
            source, location, f"{int(pixels[0]):,}" if pixels else "too many"
        ) from error
    except (
        OSError,
        ValueError,
        SyntaxError,
        RuntimeError,
        MemoryError,
        TypeError,
        KeyError,
    ) as error:
        raise unreadable("image", source, location, error) from error


def _too_large(source: str, location: str, pixels: str) -> UserError:
    return UserError(
        f"{location}: the image {shown(source)} has {pixels} pixels, more than {MAX_PIXELS:,}: make it smaller"
    )


@contextmanager
def _opened_image(source: str, location: str) -> Generator["Image.Image"]:
    """Open an image whose pixels are not read yet."""
    from PIL import Image

    Image.init()
    formats = [name for name in FORMATS if name in Image.OPEN]
    with open_file(source, location) as file, Image.open(file, formats=formats) as image:
        yield image


@contextmanager
def open_file(source: str, location: str) -> Generator[IO[bytes]]:
    """Open the file of a path, or the content of a ``data:`` URL."""
    if not source.startswith(_DATA):
        with open_regular_file(Path(source)) as file:
            yield file
        return
    head, _, text = source.partition(",")
    if not head.endswith(";base64"):
        raise UserError(f"{location}: a data: URL without ;base64 is not read: encode it in base64")
    try:
        content = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise UserError(
            f"{location}: a data: URL has damaged base64 ({error}): encode it again"
        ) from error
    yield io.BytesIO(content)


def unreadable(kind: str, source: str, location: str, error: Exception) -> UserError:
    """What to raise for a damaged file; ``kind`` is the word for it."""
    if isinstance(error, UserError):
        return error
    reason = getattr(error, "strerror", None) or one_line(error)
    reason = re.sub(r"\s*<_io[^>]*>", "", reason)  # PIL names an open file by its address
    return UserError(
        f"{location}: the {kind} {shown(source)} cannot be read ({reason}): repair it, or remove the record"
    )
