# SPDX-License-Identifier: Apache-2.0
"""The environment of a run: versions of programs, the machine, and the state of the sources in git."""

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from megatron.bridge.version import __version__

PACKAGES = (
    "torch",
    "megatron-core",
    "transformers",
    "datasets",
    "numpy",
    "safetensors",
    "transformer-engine",
)
SOURCES = Path(__file__).resolve().parents[1]
DIFF_BYTES = 1_000_000
CHANGES = (
    "status",
    "--porcelain",
    "--untracked-files=no",
)  # lists the files that differ from the commit
_SECONDS = 10.0  # a repository on a slow disk must not delay the start of a run


def environment() -> dict[str, Any]:
    """Return versions, the machine, the command, and git's state of this package and of the working directory."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "host": platform.node(),
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
        "versions": {"python": platform.python_version(), "hf-megatron-bridge": __version__}
        | _package_versions(),
        "gpu": _describe_gpu(),
        "git": {"hf-megatron-bridge": git_state(SOURCES), "working directory": git_state(Path())},
    }


def _package_versions() -> dict[str, str]:
    versions: dict[str, str] = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _describe_gpu() -> dict[str, Any] | None:
    """Return name and number of this machine's GPUs, and the versions of CUDA and driver; None without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return None
    driver = Path("/proc/driver/nvidia/version")
    return {
        "name": torch.cuda.get_device_name(),
        "count": torch.cuda.device_count(),
        "cuda": torch.version.cuda,
        "driver": driver.read_text().splitlines()[0] if driver.exists() else None,
    }


def git_state(folder: Path) -> dict[str, Any] | None:
    """Return commit, branch and whether files differ from the commit; None outside of a repository, or without git.

    A package that is installed inside of a repository, but is not tracked there, has no state.
    """
    top = git(folder, "rev-parse", "--show-toplevel")
    commit = git(folder, "rev-parse", "HEAD")
    if (
        top is None
        or commit is None
        or (folder == SOURCES and not git(folder, "ls-files", "version.py"))
    ):
        return None
    changed = git(folder, *CHANGES)
    return {
        "top": top.strip(),
        "commit": commit.strip(),
        "branch": (git(folder, "rev-parse", "--abbrev-ref", "HEAD") or "").strip(),
        "dirty": None if changed is None else bool(changed.strip()),
    }


def git_diff(states: dict[str, Any]) -> str:
    """Return the difference from the commits of ``states`` for ``git apply``, without untracked files."""
    tops = dict.fromkeys(
        state["top"] for state in states.values() if state is not None and state["dirty"]
    )
    diffs = (git(Path(top), "diff", "HEAD", "--no-color", "--no-ext-diff") for top in tops)
    return "".join(_shorten_diff(diff or "") for diff in diffs)


def _shorten_diff(text: str) -> str:
    if len(text) <= DIFF_BYTES:
        return text
    return f"{text[:DIFF_BYTES]}\n# {len(text) - DIFF_BYTES:,} further characters are left out\n"


def git(folder: Path, *words: str) -> str | None:
    """Return the output of a git command in ``folder``; None if it fails, takes too long, or git is not installed."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words],
            check=True,
            capture_output=True,
            timeout=_SECONDS,
            env=os.environ | {"GIT_OPTIONAL_LOCKS": "0"},  # the user may run git at the same time
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace")


def summary(report: dict[str, Any]) -> list[str]:
    """Describe the environment in a few lines."""
    gpu = report["gpu"]
    hardware = "without a GPU"
    if gpu is not None:
        hardware = f"on {gpu['count']} x {gpu['name']}, CUDA {gpu['cuda']}, {gpu['driver']}"
    lines = [
        f"started {report['started']} on {report['host']}, {report['processes']} processes",
        "with " + ", ".join(f"{name} {version}" for name, version in report["versions"].items()),
        hardware,
    ]
    for name, state in report["git"].items():
        if state is not None:
            changes = "with changes" if state["dirty"] else "unchanged"
            lines.append(f"git: {name}: commit {state['commit']} of {state['branch']}, {changes}")
    return lines
