# SPDX-License-Identifier: Apache-2.0
"""Kubernetes manifests of a run: a JobSet, or a PyTorchJob of Kubeflow's training operator."""

import re
from dataclasses import dataclass
from typing import Any, Literal

from megatron.bridge.launchers.options import control_characters, too_small
from megatron.bridge.utils.errors import refuse

Kind = Literal["jobset", "pytorchjob"]

PORT = 29500
GPU = "nvidia.com/gpu"
REPLICATED_JOB = "node"
_LONGEST_NAME = (
    40  # pods append the name of their job and their index, and a host name has 63 characters
)
_NAME = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_QUANTITY = re.compile(r"\d+(\.\d+)?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?")
_RESOURCE = re.compile(r"([a-z0-9.-]+/)?[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class KubernetesOptions:
    """One run on Kubernetes; the options of ``megatron-bridge launch`` say what each attribute means.

    ``program`` is what torchrun starts: a script in the image, or ``-m`` and a module, with arguments.
    """

    kind: Kind
    experiment_name: str
    namespace: str | None
    container_image: str
    program: tuple[str, ...]
    nodes: int
    devices: int
    cpu: bool
    mount: tuple[str, ...]
    resource: dict[str, str]
    rdma: str | None
    env: dict[str, str]
    retries: int
    preempt_time: int

    def validate(self) -> None:
        refuse(
            [
                *control_characters(self, quoted=("program", "env")),
                *_image_problems(self.container_image),
                *_name_problems(self),
                *_volume_problems(self.mount),
                *_resource_problems(self),
                *_variable_problems(self.env),
                *too_small(self, {"nodes": 1, "devices": 1, "retries": 0}),
            ]
        )


def _image_problems(image: str) -> list[str]:
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._/:@-]*", image):
        return []
    return [
        f"--container-image {image!r} is not the name of an image: write REGISTRY/NAME:TAG or NAME@DIGEST"
    ]


def _variable_problems(variables: dict[str, str]) -> list[str]:
    return [
        f"--env {name!r} is not the name of a variable: use letters, digits and '_'"
        for name in variables
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name)
    ]


def _name_problems(options: KubernetesOptions) -> list[str]:
    names = {"--experiment-name": options.experiment_name}
    if options.namespace is not None:
        names["--namespace"] = options.namespace
    return [
        f"{option} {name!r} is not a name in Kubernetes: use at most {_LONGEST_NAME} small letters, digits and "
        "'-', with a letter first"
        for option, name in names.items()
        if not _NAME.fullmatch(name) or len(name) > _LONGEST_NAME
    ]


def _volume_problems(volumes: tuple[str, ...]) -> list[str]:
    problems = [
        f"--mount {volume} is not a volume: write CLAIM:/PATH, with the name of a persistent volume claim"
        for volume in volumes
        if not re.fullmatch(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?:/[^:]*", volume)
    ]
    places = [volume.partition(":")[2] for volume in volumes]
    twice = sorted({mount_path for mount_path in places if places.count(mount_path) > 1})
    return problems + [
        f"--mount has {mount_path} twice: mount each volume at its own path" for mount_path in twice
    ]


def _resource_problems(options: KubernetesOptions) -> list[str]:
    problems = [
        f"--resource {name}={quantity} is not a resource: write NAME=QUANTITY, such as memory=900Gi"
        for name, quantity in options.resource.items()
        if not (_RESOURCE.fullmatch(name) and _QUANTITY.fullmatch(quantity))
    ]
    if options.rdma is not None and not re.fullmatch(
        rf"{_RESOURCE.pattern}=[1-9]\d*", options.rdma
    ):
        problems.append(
            f"--rdma {options.rdma} is not a resource: write NAME=COUNT, such as rdma/ib=8"
        )
    if GPU in options.resource:
        problems.append(
            f"--resource {GPU}={options.resource[GPU]}: give the number of GPUs with --devices"
        )
    return problems


def manifest(options: KubernetesOptions) -> dict[str, Any]:
    options.validate()
    return (_jobset if options.kind == "jobset" else _pytorchjob)(options)


def _metadata(options: KubernetesOptions) -> dict[str, Any]:
    namespace = {} if options.namespace is None else {"namespace": options.namespace}
    return {"name": options.experiment_name, **namespace}


def _jobset(options: KubernetesOptions) -> dict[str, Any]:
    # JobSet gives each pod this host name, with the name of the set as its domain
    first = f"{options.experiment_name}-{REPLICATED_JOB}-0-0.{options.experiment_name}"
    words = [f"--nnodes={options.nodes}", f"--nproc-per-node={options.devices}"]
    words += [
        "--node-rank=$(JOB_COMPLETION_INDEX)",
        f"--master-addr={first}",
        f"--master-port={PORT}",
    ]
    job = {
        "parallelism": options.nodes,
        "completions": options.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,  # if one pod fails, the set starts all of them again
        "template": {"spec": {"restartPolicy": "Never", **_pod(options, words)}},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(options),
        "spec": {
            "failurePolicy": {"maxRestarts": options.retries},
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "replicatedJobs": [{"name": REPLICATED_JOB, "replicas": 1, "template": {"spec": job}}],
        },
    }


def _pytorchjob(options: KubernetesOptions) -> dict[str, Any]:
    def replicas(count: int) -> dict[str, Any]:
        # the operator tells torchrun the nodes and their order in variables
        return {
            "replicas": count,
            "restartPolicy": "OnFailure",
            "template": {"spec": _pod(options, [])},
        }

    workers = {"Worker": replicas(options.nodes - 1)} if options.nodes > 1 else {}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": _metadata(options),
        "spec": {
            "nprocPerNode": str(options.devices),
            "runPolicy": {"backoffLimit": options.retries, "cleanPodPolicy": "Running"},
            "pytorchReplicaSpecs": {"Master": replicas(1), **workers},
        },
    }


def _pod(options: KubernetesOptions, torchrun: list[str]) -> dict[str, Any]:
    claims = list(dict.fromkeys(volume.partition(":")[0] for volume in options.mount))
    names = {claim: f"claim-{index}" for index, claim in enumerate(claims)}
    volumes: list[dict[str, Any]] = [
        # the data loaders and NCCL share memory, and a container has 64 MB by default
        {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
        *(
            {"name": name, "persistentVolumeClaim": {"claimName": claim}}
            for claim, name in names.items()
        ),
    ]
    parts = [volume.partition(":") for volume in options.mount]
    mounts = [{"name": "shared-memory", "mountPath": "/dev/shm"}]
    mounts += [{"name": names[claim], "mountPath": mount_path} for claim, _, mount_path in parts]
    container: dict[str, Any] = {
        "name": "pytorch",  # the training operator looks for this name
        "image": options.container_image,
        "command": ["torchrun", *torchrun, *map(_literal, options.program)],
        "volumeMounts": mounts,
    }
    if options.env:
        container["env"] = [
            {"name": name, "value": _literal(value)} for name, value in options.env.items()
        ]
    if resources := _resources(options):
        container["resources"] = {"requests": resources, "limits": dict(resources)}
    if options.rdma is not None:
        container["securityContext"] = {
            "capabilities": {"add": ["IPC_LOCK"]}
        }  # adapters need pinned memory
    return {
        "terminationGracePeriodSeconds": options.preempt_time,
        "containers": [container],
        "volumes": volumes,
    }


def _literal(text: str) -> str:
    """The text as Kubernetes reads it: it replaces $(NAME), and writes $$(NAME) as $(NAME)."""
    return text.replace("$(", "$$(")


def _resources(options: KubernetesOptions) -> dict[str, str]:
    gpus = {} if options.cpu else {GPU: str(options.devices)}
    rdma = {} if options.rdma is None else dict([options.rdma.split("=")])
    return {**gpus, **options.resource, **rdma}
