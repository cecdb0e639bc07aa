# SPDX-License-Identifier: Apache-2.0
"""What a launch can be asked for, and what contradicts what."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from megatron.bridge.launchers.targets import PackagerName
from megatron.bridge.utils.errors import refuse

Launcher = Literal["torchrun", "ft", "default"]

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
_TIME = re.compile(r"(\d+-)?\d+(:\d+){0,2}")
_CLUSTER_ONLY = (
    "partition",
    "account",
    "gres",
    "cpus_per_task",
    "ssh_tunnel",
    "container_image",
    "chain",
    "retries",
)


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """One launch; the options of ``megatron-bridge launch`` say what each attribute means.

    ``arguments`` are those of ``script``, which starts on every rank.
    """

    on: str = "slurm"
    executor: dict[str, Any] = field(default_factory=dict)
    local: bool
    script: Path
    arguments: tuple[str, ...]
    experiment_name: str
    launcher: Launcher
    devices: int
    nodes: int
    cpu: bool
    partition: str | None = None
    account: str | None = None
    time: str
    preempt_time: int
    gres: str | None = None
    cpus_per_task: int = 0
    retries: int = 0
    chain: int = 1
    ssh_tunnel: bool = False
    host: str | None
    user: str | None
    identity: Path | None
    remote_job_dir: Path | None
    container_image: str | None = None
    mount: tuple[str, ...]
    venv: Path | None
    packager: PackagerName
    env: dict[str, str]
    perf_env: bool
    nsys: bool
    dry_run: bool
    detach: bool
    tail_logs: bool

    @property
    def world_size(self) -> int:
        return self.nodes * self.devices

    def validate(self) -> None:
        minimums = {
            "devices": 1,
            "nodes": 1,
            "chain": 1,
            "retries": 0,
            "preempt_time": 0,
            "cpus_per_task": 0,
        }
        refuse(
            [
                *too_small(self, minimums),
                *control_characters(self, quoted=("arguments", "env")),
                *_texts(self),
                *(_local(self) if self.local else _remote(self)),
            ]
        )


def too_small(options: object, minimums: dict[str, int]) -> list[str]:
    """A sentence for each of the ``options`` that is below its minimum in ``minimums``."""
    return [
        f"{_flag(name)} {value} is not possible: it must be at least {minimum}"
        for name, minimum in minimums.items()
        if (value := getattr(options, name)) < minimum
    ]


def control_characters(options: Any, quoted: tuple[str, ...] = ()) -> list[str]:
    """Return a sentence for each of the ``options`` with a line break or another control character.

    They are written into manifests, batch scripts and commands, where a line break would start another line.

    Args:
        options: A dataclass.
        quoted: Names of fields whose texts are quoted wherever they are written.
    """
    names = [item.name for item in fields(options) if item.name not in quoted]
    problems: list[str] = []
    for name in names:
        for text in _texts_in(getattr(options, name)):
            if any(ord(character) < 32 or ord(character) == 127 for character in text):
                problems.append(
                    f"{_flag(name)} {text!r} has a line break or another control character: remove it"
                )
    return problems


def _texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str | Path):
        yield str(value)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from _texts_in(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _texts_in(item)


def _texts(options: LaunchOptions) -> list[str]:
    problems: list[str] = []
    if not _NAME.fullmatch(options.experiment_name):
        problems.append(
            f"--experiment-name {options.experiment_name!r} names a folder: use letters, digits, '.', '-' and '_'"
        )
    if not _TIME.fullmatch(options.time):
        problems.append(
            f"--time {options.time} is not a duration: write hours:minutes:seconds, such as 04:00:00"
        )
    # NeMo-Run writes the names in capitals, so another spelling would set another variable
    problems += [
        f"--env {name}: the name must be capital letters, digits and '_'"
        for name in options.env
        if not re.fullmatch(r"[A-Z_][A-Z0-9_]*", name)
    ]
    return problems


def _local(options: LaunchOptions) -> list[str]:
    """What has a meaning on a cluster only."""
    problems = [
        f"{_flag(name)} belongs to a cluster: leave it out, or leave out --local"
        for name in _CLUSTER_ONLY
        if getattr(options, name) != getattr(LaunchOptions, name)  # its default
    ]
    if options.nodes > 1:
        problems.append(
            f"--nodes {options.nodes}: --local runs on this machine alone; leave one of them out"
        )
    if options.nsys:
        problems.append(
            "--nsys profiles jobs of a cluster: for --local put `nsys profile` before torchrun"
        )
    if options.launcher == "default" and options.devices > 1:
        problems.append(
            f"--launcher default starts one process here, not --devices {options.devices}: use --launcher torchrun"
        )
    return problems


def _remote(options: LaunchOptions) -> list[str]:
    problems: list[str] = []
    needed = {"host": options.host, "user": options.user, "remote_job_dir": options.remote_job_dir}
    if options.ssh_tunnel:
        problems += [
            f"--ssh-tunnel needs {_flag(name)}" for name, value in needed.items() if value is None
        ]
    else:
        given = {"host": options.host, "user": options.user, "identity": options.identity}
        problems += [
            f"{_flag(name)} needs --ssh-tunnel"
            for name, value in given.items()
            if value is not None
        ]
    if options.mount and options.container_image is None:
        problems.append("--mount needs --container-image")
    if options.venv is not None and options.container_image is not None:
        problems.append("--venv and --container-image are two places to run in: leave one out")
    if options.packager == "none" and options.ssh_tunnel and not options.script.is_absolute():
        problems.append(
            f"--packager none copies nothing, so --script {options.script} must be an absolute path of the cluster"
        )
    return problems


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
