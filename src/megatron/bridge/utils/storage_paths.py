# SPDX-License-Identifier: Apache-2.0
"""URLs of object storage, and their local folders: ``<cache>/s3/bucket/run`` for ``s3://bucket/run``.

Code that reads or writes files uses these folders. ``utils.storage`` downloads from the bucket to them, and uploads
from them. Messages and saved configs show the URL.
"""

import os
import re
from functools import cache
from pathlib import Path

CACHE = (
    "MEGATRON_BRIDGE_CACHE"  # environment variable: the folder of downloads and of files to upload
)
_URL = re.compile(r"([a-z][a-z0-9+.-]+):/{1,2}(.*)", re.DOTALL)  # pathlib merges two slashes


def split(text: object) -> tuple[str, str] | None:
    """Split a URL into its scheme and the rest; return None for a path.

    Example:
        >>> split("s3://bucket/run"), split("runs/llama")
        (('s3', 'bucket/run'), None)
    """
    url_match = _URL.fullmatch(str(text))
    return None if url_match is None else (url_match[1], url_match[2].strip("/"))


def root() -> str:
    return _resolve_cache(os.environ.get(CACHE) or "~/.cache/megatron-bridge")


@cache
def _resolve_cache(cache: str) -> str:
    return str(Path(cache).expanduser().resolve() / "storage")


def url_of(path: str | Path) -> str | None:
    """Return the URL of a local folder or file, or None if it has none."""
    scheme, _, rest = str(path).removeprefix(root() + os.sep).partition(os.sep)
    return f"{scheme}://{rest}" if rest and str(path).startswith(root() + os.sep) else None


def shown(text: str) -> str:
    """Replace the local folders of URLs in ``text`` by the URLs."""
    prefix = root() + os.sep
    return (
        re.sub(re.escape(prefix) + r"([a-z][a-z0-9+.-]+)/", r"\1://", text)
        if prefix in text
        else text
    )


def beside(path: Path, ending: str) -> Path:
    """Return the path of a note about a downloaded file."""
    note = Path(root(), ".state", path.relative_to(root()))
    note.parent.mkdir(parents=True, exist_ok=True)
    return note.with_name(note.name + ending)
