# SPDX-License-Identifier: Apache-2.0
"""Images, videos and audio in records: parts of messages, or lists next to the messages with marks in their text.

In a conversation with media, content is a list of parts. An image is the part ``{"type": "image"}``, as chat
templates expect it; the references to the media are stored next to the messages, in the same order.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from megatron.bridge.utils.errors import UserError

MARKS = {"image": "<image>", "video": "<video>", "audio": "<audio>"}
MEDIA_KEYS = ("image", "images", "video", "videos", "audio", "audios")
_TYPES = {
    **dict.fromkeys(("image", "image_url", "input_image"), "image"),
    **dict.fromkeys(("video", "video_url", "input_video"), "video"),
    **dict.fromkeys(("audio", "audio_url", "input_audio"), "audio"),
}
_FURTHER_SOURCES = {"audio": ("input_audio", "array")}
_SOURCES: dict[str, tuple[str, ...]] = {
    kind: (kind, "path", "url", "bytes", f"{kind}_url", *_FURTHER_SOURCES.get(kind, ()))
    for kind in MARKS
}
_WITH_MEDIA = ("system", "developer", "user")

Message = dict[str, Any]
_Listed = dict[str, Iterator[Any]]  # kind -> the media that the record lists next to the messages


class PlacedMedium(NamedTuple):
    """A record's reference to an image, a video or a recording, and the message with it."""

    message: int
    kind: str  # a key of MARKS
    raw: Any


def place_media(
    record: Mapping[str, Any], messages: list[Message], location: str
) -> list[PlacedMedium]:
    """Find the media of a record and put ``{"type": kind}`` into its messages where each belongs.

    Messages are changed: with media, all content becomes a list of parts; without, it stays as it is.
    """
    lists = {
        kind: placed
        for kind in MARKS
        if (placed := _listed_media(record, kind, location)) is not None
    }
    given = {kind: iter(placed) for kind, placed in lists.items()}
    placed = [
        PlacedMedium(index, kind, raw)
        for index, message in enumerate(messages)
        for kind, raw in _of_message(message, given, f"{location}: message {index + 1}")
    ]
    for kind, rest in given.items():
        if left := len(list(rest)):
            raise UserError(
                f"{location}: the record has {len(lists[kind])} {kind}s, {left} of them without a place: write "
                f"{MARKS[kind]} where each belongs"
            )
    if placed:
        for message in messages:
            message["content"] = as_parts(message["content"])
    return placed


def as_parts(content: Any) -> list[dict[str, Any]]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


def text_of(content: Any) -> str:
    """Return the text of content, which is a string or a list of parts."""
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content)


def _listed_media(record: Mapping[str, Any], kind: str, location: str) -> list[Any] | None:
    """Return the media of this kind next to the messages, or None if the record has no such list."""
    keys = [key for key in (kind, f"{kind}s") if record.get(key) is not None]
    if len(keys) > 1:
        raise UserError(f"{location}: the record has both {kind} and {kind}s: keep one")
    if not keys:
        return None
    value = record[keys[0]]
    return list(value) if isinstance(value, list | tuple) else [value]


def _of_message(message: Message, given: _Listed, location: str) -> list[tuple[str, Any]]:
    """Replace the content of a message by parts, and return its media."""
    content = message["content"]
    media = []
    parts: list[dict[str, Any]] = []
    for part in content if isinstance(content, list) else [{"type": "text", "text": content}]:
        for piece in _split_at_marks(part["text"], given) if part["type"] == "text" else [part]:
            if (kind := piece["type"]) in MARKS:
                media.append(
                    (
                        kind,
                        piece["raw"]
                        if piece.get("raw") is not None
                        else _next_medium(given, kind, location),
                    )
                )
                piece = {"type": kind}  # noqa: PLW2901
            parts.append(piece)
    if media and message["role"] not in _WITH_MEDIA:
        raise UserError(
            f"{location}: a message of role={message['role']} has an image, a video or audio, where no "
            "model reads it: move it to a message of the user"
        )
    if media:
        message["content"] = parts
    return media


def _next_medium(given: _Listed, kind: str, location: str) -> Any:
    missing = object()
    medium = next(given.get(kind, iter(())), missing)
    if medium is missing:
        raise UserError(
            f"{location}: there are more places for {kind}s than {kind}s: give one {kind} for "
            f"each {MARKS[kind]} and for "
            f"each {kind} part"
        )
    return medium


def _split_at_marks(text: str, given: _Listed) -> list[dict[str, Any]]:
    """Split the text at the marks of the kinds that the record lists, and make a part of each mark."""
    marks = {MARKS[kind]: kind for kind in given}
    pieces = re.split(f"({'|'.join(marks)})", text) if marks else [text]
    return [
        {"type": marks[piece]} if piece in marks else {"type": "text", "text": piece}
        for piece in pieces
        if piece
    ] or [{"type": "text", "text": ""}]


def content_part(part: Any, location: str) -> dict[str, Any]:
    """Parse a part of content. Its type is ``text``, or a key of ``MARKS`` with the record's reference as ``raw``."""
    name = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if isinstance(part, Mapping):
        # tables fill the keys of other parts with nulls
        part = {key: value for key, value in part.items() if value is not None}
        name = part.get("type") or _type_from_keys(part)
        if name == "text" and isinstance(part.get("text"), str):
            return {"type": "text", "text": part["text"]}
        if kind := _TYPES.get(name):
            return {"type": kind, "raw": _raw_reference(part, kind, location)}
    raise UserError(
        f"{location}: a content part of type {name} is neither text nor an image nor a video nor audio: remove it"
    )


def _type_from_keys(part: Mapping[str, Any]) -> str:
    """Derive the type of a part without ``type`` from its keys."""
    if "text" in part:
        return "text"
    if "video" in part or "video_url" in part:
        return "video"
    if any(key in part for key in ("audio", "audio_url", "input_audio", "array")):
        return "audio"
    return "image" if any(key in part for key in _SOURCES["image"]) else "without type"


def _raw_reference(part: Mapping[str, Any], kind: str, location: str) -> Any:
    """Return the reference of a part, or None if it has none. A list of video frames comes with its rate."""
    names = _SOURCES[kind]
    references = [part[key] for key in names if key in part]
    if len(references) > 1 and not ("bytes" in part or "path" in part):
        raise UserError(
            f"{location}: a part of type {kind} has several of {', '.join(names)}: keep one"
        )
    if not references:
        return None
    raw = part["bytes"] if "bytes" in part else references[0]
    if isinstance(raw, list) and kind == "video":
        return {"frames": raw, "fps": part.get("fps")}
    if "fps" in part and kind == "video":
        raise UserError(
            f"{location}: a video part has fps={part['fps']}, and the file has its own: set dataset.fps"
        )
    if isinstance(raw, Mapping) and kind == "audio" and "data" in raw:
        return _openai_audio(raw, location)
    if kind == "audio" and ("array" in part or "sampling_rate" in part):
        samples = {"array": part["array"]} if "array" in part else {kind: raw}
        return {**samples, "sampling_rate": part.get("sampling_rate")}
    if isinstance(raw, Mapping) and "url" in raw:  # OpenAI's {"image_url": {"url": ...}}
        return raw["url"]
    return raw


def _openai_audio(raw: Mapping[str, Any], location: str) -> str:
    """The ``data:`` URL of OpenAI's ``{"input_audio": {"data": base64, "format": "wav"}}``."""
    data = raw["data"]
    if not isinstance(data, str) or not data:
        raise UserError(
            f"{location}: the data of input_audio is {type(data).__name__}: give the file in base64"
        )
    return (
        data if data.startswith("data:") else f"data:audio/{raw.get('format', 'wav')};base64,{data}"
    )
