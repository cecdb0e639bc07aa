# SPDX-License-Identifier: Apache-2.0
"""Where ``launch --on`` starts a run, and what each target takes and needs."""

from dataclasses import dataclass
from typing import Literal

PackagerName = Literal["pattern", "git", "none"]

# options of ``launch`` that some targets do not take
_EXECUTOR = ["executor"]
_MANIFEST = ["kind", "namespace", "resource", "rdma", "output"]
_NOT_STARTED_HERE = ["dry_run", "detach", "tail_logs", "perf_env"]
_QUEUE = [
    "local",
    "launcher",
    "partition",
    "account",
    "time",
    "gres",
    "cpus_per_task",
    "chain",
    "packager",
]
_MACHINE = ["ssh_tunnel", "host", "user", "identity", "remote_job_dir", "venv", "nsys"]


@dataclass(frozen=True, kw_only=True)
class Target:
    """A place that starts runs.

    Attributes:
        refused: Options of ``launch`` that have no effect there.
        module: What must be installed; None for what this package needs anyway.
        install: The command that installs ``module``.
        packager: How the code gets there; None leaves it to ``--packager``.
    """

    refused: list[str]
    module: str | None = None
    install: str = ""
    packager: PackagerName | None = None


TARGETS = {
    "slurm": Target(
        refused=[*_EXECUTOR, *_MANIFEST],
    ),
    "kubernetes": Target(
        refused=[*_EXECUTOR, *_NOT_STARTED_HERE, *_QUEUE, *_MACHINE],
    ),
    "docker": Target(
        refused=[*_MANIFEST, *_QUEUE, *_MACHINE, "nodes", "retries", "preempt_time"],
        module="docker",
        install="pip install 'hf-megatron-bridge[launch]'",
        packager="pattern",
    ),
    "ray": Target(
        refused=[
            *_EXECUTOR,
            *_MANIFEST,
            *_QUEUE,
            *_MACHINE,
            "detach",
            "tail_logs",
            "perf_env",
            "container_image",
            "mount",
            "retries",
            "preempt_time",
        ],
        module="ray",
        install="pip install 'hf-megatron-bridge[ray]'",
        packager="none",
    ),
}
"""Value of ``--on`` -> the target."""
