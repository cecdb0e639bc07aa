# SPDX-License-Identifier: Apache-2.0
"""What the repository tests look at: the tracked files of the source tree."""

import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[3]


@cache
def tracked(pattern: str = "*") -> list[Path]:
    """Files that git tracks, or would, under ``pattern`` (git's own matching)."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", pattern],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [path for path in (ROOT / line for line in listed.stdout.splitlines()) if path.is_file()]
