# SPDX-License-Identifier: Apache-2.0
"""Images in records: as parts of messages, or in a list beside them with a mark where each belongs.

In a conversation with images, content is a list of parts, in which an image is ``{"type": "image"}`` as chat
templates expect it; what the record says about the images is kept beside it, in the same order.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from megatron.bridge.utils.errors import UserError

MARK = "<image>"
MEDIA_KEYS = ("image", "images", "video", "videos", "audio", "audios")
_IMAGE_TYPES = ("image", "image_url", "input_image")
_SOURCES = ("image", "path", "url", "bytes", "image_url")
_REFUSED = {"video": "videos", "video_url": "videos", "audio": "audio", "input_audio": "audio", "audio_url": "audio"}
_WITH_IMAGES = ("system", "developer", "user")

Message = dict[str, Any]


class PlacedImage(NamedTuple):
    """What a record says about an image, and the message that it is in."""

    message: int
    raw: Any


def place_images(record: Mapping[str, Any], messages: list[Message], where: str) -> list[PlacedImage]:
    """Find the images of a record and put ``{"type": "image"}`` into its messages where each belongs.

    Messages are changed: with images, all content becomes a list of parts; without, it stays as it is.
    """
    listed = _listed(record, where)
    given = None if listed is None else iter(listed)
    found = [
        PlacedImage(index, raw)
        for index, message in enumerate(messages)
        for raw in _of_message(message, given, listed is not None, f"{where}: message {index + 1}")
    ]
    if given is not None and (left := len(list(given))):
        raise UserError(
            f"{where}: the record has {len(listed or ())} images, {left} of them without a place: write {MARK} "
            "where each belongs"
        )
    if found:
        for message in messages:
            message["content"] = as_parts(message["content"])
    return found


def as_parts(content: Any) -> list[dict[str, Any]]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


def text_of(content: Any) -> str:
    """The text of content of either form."""
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content)


def _listed(record: Mapping[str, Any], where: str) -> list[Any] | None:
    """The images beside the messages; None if the record has no such list."""
    for key in MEDIA_KEYS:
        if key not in ("image", "images") and record.get(key):
            raise UserError(f"{where}: the record has {key}, and only images are supported: remove {key}")
    keys = [key for key in ("image", "images") if record.get(key) is not None]
    if len(keys) > 1:
        raise UserError(f"{where}: the record has both image and images: keep one")
    if not keys:
        return None
    found = record[keys[0]]
    return list(found) if isinstance(found, list | tuple) else [found]


def _of_message(message: Message, given: Iterator[Any] | None, has_list: bool, where: str) -> list[Any]:
    """The images of a message, whose content is replaced by parts."""
    content, found = message["content"], []
    parts: list[dict[str, Any]] = []
    for part in content if isinstance(content, list) else [{"type": "text", "text": content}]:
        pieces = _split(part["text"]) if part["type"] == "text" and has_list else [part]
        for piece in pieces:
            if piece["type"] == "image":
                found.append(piece["raw"] if piece.get("raw") is not None else _next(given, where))
                piece = {"type": "image"}  # noqa: PLW2901
            parts.append(piece)
    if found and message["role"] not in _WITH_IMAGES:
        raise UserError(
            f"{where}: an image in a message of role={message['role']}, where no model reads it: move it to a "
            "message of the user"
        )
    if found:
        message["content"] = parts
    return found


def _next(given: Iterator[Any] | None, where: str) -> Any:
    missing = object()
    found = next(given, missing) if given is not None else missing
    if found is missing:
        raise UserError(
            f"{where}: there are more places for images than images: give one image for each {MARK} and for each "
            "image part"
        )
    return found


def _split(text: str) -> list[dict[str, Any]]:
    pieces = re.split(f"({re.escape(MARK)})", text)
    return [{"type": "image"} if piece == MARK else {"type": "text", "text": piece} for piece in pieces if piece] or [
        {"type": "text", "text": ""}
    ]


def content_part(part: Any, where: str) -> dict[str, Any]:
    """A part of content: ``text``, or ``image`` with what the record says about it under ``raw``."""
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if isinstance(part, Mapping):
        # tables fill the keys of other parts with nulls
        part = {key: value for key, value in part.items() if value is not None}
        untyped = "text" if "text" in part else "image" if any(key in part for key in _SOURCES) else "without type"
        kind = part.get("type") or untyped
        if kind == "text" and isinstance(part.get("text"), str):
            return {"type": "text", "text": part["text"]}
        if kind in _IMAGE_TYPES:
            return {"type": "image", "raw": _raw(part, where)}
    if kind in _REFUSED:
        raise UserError(f"{where}: a content part of type {kind}: {_REFUSED[kind]} are not supported: remove it")
    raise UserError(f"{where}: a content part of type {kind} is neither text nor an image: remove it")


def _raw(part: Mapping[str, Any], where: str) -> Any:
    """What an image part names; None for a bare one."""
    found = [part[key] for key in _SOURCES if key in part]
    if len(found) > 1 and not ("bytes" in part or "path" in part):
        raise UserError(f"{where}: an image part has several of {', '.join(_SOURCES)}: keep one")
    if not found:
        return None
    raw = part["bytes"] if "bytes" in part else found[0]
    if isinstance(raw, Mapping) and "url" in raw:  # OpenAI's {"image_url": {"url": ...}}
        return raw["url"]
    return raw
