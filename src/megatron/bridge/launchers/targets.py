# SPDX-License-Identifier: Apache-2.0
"""Where ``launch --on`` starts a run. To add a target that NeMo-Run has an executor for, add a row."""

from dataclasses import dataclass, field
from typing import Any, Literal

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
        executor: The class of NeMo-Run that starts it; None for Slurm, which ``nemo.py`` knows, and for targets without
            NeMo-Run.
        module: What must be installed; None for what this package needs anyway.
        install: The command that installs ``module``.
        packager: How the code gets there; None leaves it to ``--packager``.
        options: Option of ``launch`` -> field of the executor. ``gpus`` is ``--devices``, or 0 with ``--cpu``.
        secrets: Field of the executor -> the variable of the environment that alone gives its value.
        needs: Field of the executor without a useful default -> how to give it.
        fixed: Fields of the executor that have values of our own.
    """

    refused: list[str]
    executor: str | None = None
    module: str | None = None
    install: str = ""
    packager: PackagerName | None = None
    options: dict[str, str] = field(default_factory=dict[str, str])
    secrets: dict[str, str] = field(default_factory=dict[str, str])
    needs: dict[str, str] = field(default_factory=dict[str, str])
    fixed: dict[str, Any] = field(default_factory=dict[str, Any])


TARGETS = {
    "slurm": Target(
        refused=[*_EXECUTOR, *_MANIFEST],
    ),
    "kubernetes": Target(
        refused=[*_EXECUTOR, *_NOT_STARTED_HERE, *_QUEUE, *_MACHINE],
    ),
    "docker": Target(
        refused=[*_MANIFEST, *_QUEUE, *_MACHINE, "nodes", "retries", "preempt_time"],
        executor="DockerExecutor",
        module="docker",
        install="pip install 'hf-megatron-bridge[launch]'",
        packager="pattern",
        options={
            "container_image": "container_image",
            "devices": "ntasks_per_node",
            "gpus": "num_gpus",
            "mount": "volumes",
            "env": "env_vars",
        },
        needs={"container_image": "--container-image"},
        # data loaders and NCCL share memory, and a container has 64 MB by default
        fixed={"ipc_mode": "host"},
    ),
    "skypilot": Target(
        refused=[*_MANIFEST, *_QUEUE, *_MACHINE, "cpu", "mount", "retries", "preempt_time"],
        executor="SkypilotExecutor",
        module="sky",
        install="pip install 'nemo-run[skypilot]'",
        # the only one that this executor takes
        packager="git",
        options={
            "container_image": "container_image",
            "nodes": "num_nodes",
            "devices": "torchrun_nproc_per_node",
            "gpus": "gpus_per_node",
            "env": "env_vars",
        },
        needs={"gpus": "the name of a GPU, --executor gpus=NAME"},
    ),
    "lepton": Target(
        refused=[*_MANIFEST, *_QUEUE, *_MACHINE, "mount", "retries", "preempt_time"],
        executor="LeptonExecutor",
        module="leptonai",
        install="pip install 'hf-megatron-bridge[launch]'",
        packager="pattern",
        options={
            "container_image": "container_image",
            "nodes": "nodes",
            "devices": "nprocs_per_node",
            "gpus": "gpus_per_node",
            "env": "env_vars",
        },
        needs={
            "container_image": "--container-image",
            "nemo_run_dir": "--executor nemo_run_dir=PATH",
            "node_group": "--executor node_group=NAME",
            "resource_shape": "--executor resource_shape=NAME",
            "mounts": "--executor 'mounts=[{path: PATH, mount_path: PATH}]'",
        },
    ),
    "dgxcloud": Target(
        refused=[*_MANIFEST, *_QUEUE, *_MACHINE, "mount", "retries", "preempt_time"],
        executor="DGXCloudExecutor",
        module="nemo_run",
        install="pip install 'hf-megatron-bridge[launch]'",
        packager="pattern",
        options={
            "container_image": "container_image",
            "nodes": "nodes",
            "devices": "nprocs_per_node",
            "gpus": "gpus_per_node",
            "env": "env_vars",
        },
        secrets={"client_secret": "DGXCLOUD_CLIENT_SECRET"},
        needs={
            "container_image": "--container-image",
            "base_url": "--executor base_url=URL",
            "kube_apiserver_url": "--executor kube_apiserver_url=URL",
            "client_id": "--executor client_id=ID",
            "client_secret": "the variable DGXCLOUD_CLIENT_SECRET",
            "project_name": "--executor project_name=NAME",
            "pvc_nemo_run_dir": "--executor pvc_nemo_run_dir=PATH",
            "pvcs": "--executor 'pvcs=[{name: NAME, path: PATH}]'",
        },
    ),
    "kubeflow": Target(
        refused=[*_MANIFEST, *_QUEUE, *_MACHINE, "mount", "retries", "preempt_time"],
        executor="KubeflowExecutor",
        module="kubernetes",
        install="pip install 'nemo-run[kubeflow]'",
        packager="pattern",
        options={
            "container_image": "image",
            "nodes": "num_nodes",
            "devices": "nprocs_per_node",
            "gpus": "gpus_per_node",
            "env": "env_vars",
        },
        needs={"image": "--container-image", "workdir_pvc": "--executor workdir_pvc=NAME"},
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
