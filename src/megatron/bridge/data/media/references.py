# SPDX-License-Identifier: Apache-2.0
"""Where an image or a video is, how large it is, and the pixels of an image.

A record names a file by a path, or holds its bytes. Sizes are read from the header of the file, so samples are
tokenized and packed without decoding a pixel.
"""

import base64
import binascii
import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron.bridge.utils.errors import UserError, one_line

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


MediaReference = ImageReference | VideoReference


def refer(raw: Any, root: Path, where: str) -> ImageReference:
    """The reference to an image that a record names, once its size is read.

    ``raw`` is a path, a ``data:`` URL, bytes, a PIL image, or an object with one of them under ``image``, ``path``,
    ``url`` or ``bytes``. Relative paths start from ``root``, and images outside of it are refused; ``where`` names the
    record in messages.
    """
    source = source_of(raw, root, where, "image")
    height, width = _measure(source, where)
    return ImageReference(source, height, width, where)


def decode(reference: ImageReference) -> "Image.Image":
    """Decode to RGB on a white ground, and apply the EXIF orientation.

    transformers' image processors put white under transparent pixels. Its function that loads a file by name drops
    transparency instead, which shows the colors that it hid.
    """
    from PIL import ImageOps

    where = reference.where
    try:
        with _open(reference.source, where) as file:
            image = _on_white(ImageOps.exif_transpose(file))
    except (OSError, ValueError, SyntaxError, RuntimeError) as error:
        raise unreadable("image", reference.source, where, error) from error
    if image.size != (reference.width, reference.height):
        raise UserError(
            f"{where}: the image {shown(reference.source)} is {image.width}x{image.height} and was "
            f"{reference.width}x{reference.height} when the sample was made: restore it, or remove the prepared "
            "samples"
        )
    return image


def _on_white(image: "Image.Image") -> "Image.Image":
    from PIL import Image

    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    white = Image.new("RGBA", image.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")


def shown(source: str) -> str:
    return "in the record" if source.startswith(_DATA) else source


def source_of(raw: Any, root: Path, where: str, kind: str) -> str:
    """A path inside of ``root``, or a ``data:`` URL; ``kind`` is the word for it in messages."""
    if isinstance(raw, Mapping):
        raw = _named(raw, where, kind)
    if isinstance(raw, bytes | bytearray):
        return f"{_DATA};base64,{base64.b64encode(raw).decode()}"
    if hasattr(raw, "save") and hasattr(raw, "getexif"):  # an image of PIL
        return source_of(png(raw), root, where, kind)
    if not isinstance(raw, str) or not raw:
        raise UserError(
            f"{where}: the {kind} is {type(raw).__name__}: give a path, a data: URL, or the bytes of a file"
        )
    if raw.startswith(_DATA):
        return raw
    if raw.startswith(_URLS):
        raise UserError(
            f"{where}: the {kind} {raw} is on the network: download it, or set dataset.fetch_urls=true"
        )
    return str(_inside(raw.removeprefix(_FILE), root, where, kind))


def _named(raw: Mapping[str, Any], where: str, kind: str) -> Any:
    """The value of the first key that says where the file is; tables have both ``bytes`` and ``path``."""
    keys = ("bytes", kind, "path", "url")
    found = {key: raw[key] for key in keys if raw.get(key) is not None}
    if not found:
        raise UserError(
            f"{where}: the {kind} has none of {', '.join(keys)} (keys: {', '.join(raw) or 'none'})"
        )
    return next(iter(found.values()))


def png(image: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


def _inside(name: str, root: Path, where: str, kind: str) -> Path:
    try:
        # no file is outside of the root of all files, where names are those of the command's own folder
        path, folder = ((Path() if root == Path("/") else root) / name).resolve(), root.resolve()
    except (OSError, ValueError) as error:  # too long, or with a null byte
        raise UserError(f"{where}: the {kind} path {name!r} cannot be used: {error}") from error
    if not path.is_relative_to(folder):
        raise UserError(
            f"{where}: the {kind} {name} is outside of dataset.media_root={root}: set dataset.media_root to a "
            f"folder that holds all {kind}s"
        )
    if not path.is_file():
        raise UserError(
            f"{where}: the {kind} {name} is not a file in dataset.media_root={root}: add it, or correct one of both"
        )
    return path


def _measure(source: str, where: str) -> tuple[int, int]:
    """Height and width, as they are after turning."""
    try:
        with _open(source, where) as image:
            width, height = image.size
            # a PNG is decoded as a whole to look for EXIF behind its pixels, and PIL turns the size of a TIFF itself
            has_exif = "exif" in image.info if image.format == "PNG" else image.format != "TIFF"
            turned = has_exif and image.getexif().get(_ORIENTATION) in _TURNED
    except (OSError, ValueError, SyntaxError, RuntimeError) as error:
        raise unreadable("image", source, where, error) from error
    if width * height > MAX_PIXELS:
        raise UserError(
            f"{where}: the image {shown(source)} has {width}x{height} pixels, more than {MAX_PIXELS:,}: make it smaller"
        )
    return (width, height) if turned else (height, width)


def _open(source: str, where: str) -> "Image.Image":
    """The image, its pixels not read yet. PIL's own limit is not needed: ``_measure`` has one."""
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = None
    Image.init()
    return Image.open(
        file_of(source, where), formats=[name for name in FORMATS if name in Image.OPEN]
    )


def file_of(source: str, where: str) -> str | io.BytesIO:
    """The path, or the content of a ``data:`` URL."""
    if not source.startswith(_DATA):
        return source
    head, _, text = source.partition(",")
    if not head.endswith(";base64"):
        raise UserError(f"{where}: a data: URL without ;base64 is not read: encode it in base64")
    try:
        return io.BytesIO(base64.b64decode(text, validate=True))
    except (binascii.Error, ValueError) as error:
        raise UserError(
            f"{where}: a data: URL has damaged base64 ({error}): encode it again"
        ) from error


def unreadable(kind: str, source: str, where: str, error: Exception) -> UserError:
    """What to raise for a damaged file; ``kind`` is the word for it."""
    if isinstance(error, UserError):
        return error
    reason = one_line(error).split(": <")[0]  # an address of a buffer helps nobody
    return UserError(
        f"{where}: the {kind} {shown(source)} cannot be read ({reason}): repair it, or remove the record"
    )
