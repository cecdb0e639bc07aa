# SPDX-License-Identifier: Apache-2.0
"""What a job folder keeps in addition to NeMo-Run's files, so that the job can be understood and run again."""

import json
import shlex
import sys
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

import yaml

from megatron.bridge.launchers.options import LaunchOptions
from megatron.bridge.utils.environment import CHANGES, SOURCES, git

RECORD, AGAIN, CONFIG, VERSIONS = "launch.yaml", "launch_again.sh", "config.yaml", "versions.txt"


def write_job_folder(
    folder: Path, options: LaunchOptions, jobs: tuple[str, ...], config: str | None
) -> None:
    """Write the options, the config, the commit, the versions, and a script that launches the same once more."""
    folder.mkdir(parents=True, exist_ok=True)
    record = {
        "options": json.loads(json.dumps(asdict(options), default=str)),
        "jobs": list(jobs),
        "folder": str(Path.cwd()),
        "commit": (git(SOURCES, "rev-parse", "HEAD") or "").strip(),
        "changed": (git(SOURCES, *CHANGES) or "").strip().splitlines(),
    }
    (folder / RECORD).write_text(yaml.safe_dump(record, sort_keys=False))
    again = folder / AGAIN
    lines = [
        "#!/usr/bin/env bash",
        f"cd {shlex.quote(str(Path.cwd()))}",
        f'exec {shlex.join([sys.executable, *sys.argv])} "$@"',
    ]
    again.write_text("\n".join(lines) + "\n")
    again.chmod(0o755)
    if config is not None:
        (folder / CONFIG).write_text(config)
    lines = sorted(f"{item.name}=={item.version}" for item in metadata.distributions())
    (folder / VERSIONS).write_text("\n".join([f"python {sys.version.split()[0]}", *lines]) + "\n")
