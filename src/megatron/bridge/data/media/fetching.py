# SPDX-License-Identifier: Apache-2.0
"""Images and videos on the network, for records of somebody who is trusted: each is downloaded once."""

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


def fetched(raw: Any, root: Path, where: str) -> Any:
    """What a record says about an image or a video, with a path below ``root`` in the place of an address."""
    if isinstance(raw, Mapping):
        return {key: fetched(value, root, where) for key, value in raw.items()}
    if isinstance(raw, list):
        return [fetched(value, root, where) for value in raw]
    if not isinstance(raw, str) or not raw.startswith(_SCHEMES):
        return raw
    name = hashlib.blake2b(raw.encode(), digest_size=16).hexdigest() + Path(urlsplit(raw).path).suffix[:8]
    path = root / FOLDER / name
    if not path.is_file():
        content = _download(raw, where)
        try:
            path.parent.mkdir(exist_ok=True)
            with published_file(path) as aside:
                aside.write_bytes(content)
        except OSError as error:
            raise UserError(
                f"{where}: {raw} cannot be kept in {path.parent} ({error}): set dataset.media_root"
            ) from error
    return f"{FOLDER}/{name}"


def _download(address: str, where: str) -> bytes:
    request = urllib.request.Request(address, headers={"User-Agent": "megatron-bridge"})
    try:
        with urllib.request.urlopen(request, timeout=_SECONDS) as response:
            content: bytes = response.read(MAX_BYTES + 1)
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise UserError(
            f"{where}: {address} cannot be downloaded ({one_line(error)}): correct it, or remove the record"
        ) from error
    if len(content) > MAX_BYTES:
        raise UserError(f"{where}: {address} has more than {MAX_BYTES:,} bytes: download it, and give its path")
    return content
