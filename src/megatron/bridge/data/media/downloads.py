# SPDX-License-Identifier: Apache-2.0
"""Download the images and videos that records name by URL, once, below the root of the media."""

import hashlib
import http.client
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from megatron.bridge.utils.atomic import published_file
from megatron.bridge.utils.errors import UserError, one_line

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
