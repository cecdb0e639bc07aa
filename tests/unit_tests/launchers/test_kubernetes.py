# SPDX-License-Identifier: Apache-2.0
"""Kubernetes manifests: what they hold, and that Kubeflow's published models read them without losing a field."""

import dataclasses
import json
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import yaml

from megatron.bridge.cli import main
from megatron.bridge.launchers.kubernetes import KubernetesOptions, manifest
from megatron.bridge.utils.errors import UserError
from tests.unit_tests.project.tree import ROOT

BESIDE = ROOT / ".cache/kubernetes"  # where scripts/extra.sh installs them
if BESIDE.is_dir():
    sys.path.append(str(BESIDE))
needs_models = pytest.mark.skipif(
    find_spec("kubeflow_trainer_api") is None,
    reason="no published models: run scripts/extra.sh kubernetes",
)

OPTIONS = KubernetesOptions(
    kind="jobset",
    experiment_name="toy",
    namespace="team",
    container_image="registry/bridge:1",
    program=("-m", "megatron.bridge.cli.main", "train", "--recipe", "r", "a.b=$(date)"),
    nodes=4,
    devices=8,
    cpu=False,
    mount=("shared:/shared", "corpora:/data", "shared:/again"),
    resource={"memory": "900Gi", "cpu": "1500m"},
    rdma="rdma/ib=4",
    env={"NCCL_DEBUG": "INFO"},
    retries=3,
    preempt_time=90,
)
VARIANTS = {
    "everything": {},
    "one node": {"nodes": 1},
    "no GPUs": {
        "cpu": True,
        "rdma": None,
        "resource": {},
        "mount": (),
        "env": {},
        "namespace": None,
    },
}


def published(found):
    """The manifest after it was read into the published models and written again."""
    if found["kind"] == "JobSet":
        from kubeflow_trainer_api.models import JobsetV1alpha2JobSet

        return JobsetV1alpha2JobSet.from_dict(found).to_dict()
    from kubeflow.training import models
    from kubernetes import client

    for name in dir(models):  # the client looks for classes among its own
        if name.startswith("KubeflowOrg"):
            setattr(client.models, name, getattr(models, name))
    api = client.ApiClient()
    read = api.deserialize(SimpleNamespace(data=json.dumps(found)), "KubeflowOrgV1PyTorchJob")
    return api.sanitize_for_serialization(read)


@needs_models
@pytest.mark.parametrize("kind", ["jobset", "pytorchjob"])
@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_published_models_keep_every_field(kind, changes):
    found = manifest(dataclasses.replace(OPTIONS, kind=kind, **changes))
    assert published(found) == found


@needs_models
@pytest.mark.parametrize("kind", ["jobset", "pytorchjob"])
def test_published_models_lose_what_they_do_not_know(kind):
    found = manifest(dataclasses.replace(OPTIONS, kind=kind))
    assert published(found | {"spec": found["spec"] | {"failurePolice": {}}}) == found


def pods(found):
    spec = found["spec"]
    if found["kind"] == "JobSet":
        (job,) = spec["replicatedJobs"]
        return [job["template"]["spec"]["template"]["spec"]]
    return [replica["template"]["spec"] for replica in spec["pytorchReplicaSpecs"].values()]


def test_a_jobset_names_its_first_pod():
    found = manifest(OPTIONS)
    (pod,) = pods(found)
    (container,) = pod["containers"]
    assert container["command"][:6] == [
        *("torchrun", "--nnodes=4", "--nproc-per-node=8", "--node-rank=$(JOB_COMPLETION_INDEX)"),
        *("--master-addr=toy-node-0-0.toy", "--master-port=29500"),
    ]
    job = found["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (job["parallelism"], job["completions"], job["backoffLimit"]) == (4, 4, 0)
    assert found["spec"]["failurePolicy"] == {"maxRestarts": 3}


def test_a_pytorchjob_has_a_master_and_workers():
    spec = manifest(dataclasses.replace(OPTIONS, kind="pytorchjob"))["spec"]
    counts = {name: replica["replicas"] for name, replica in spec["pytorchReplicaSpecs"].items()}
    assert (counts, spec["nprocPerNode"]) == ({"Master": 1, "Worker": 3}, "8")
    assert spec["runPolicy"]["backoffLimit"] == 3
    one = manifest(dataclasses.replace(OPTIONS, kind="pytorchjob", nodes=1))["spec"]
    assert list(one["pytorchReplicaSpecs"]) == ["Master"]


@pytest.mark.parametrize("kind", ["jobset", "pytorchjob"])
def test_a_pod_has_resources_volumes_and_literal_arguments(kind):
    for pod in pods(manifest(dataclasses.replace(OPTIONS, kind=kind))):
        (container,) = pod["containers"]
        assert container["command"][-1] == "a.b=$$(date)"
        wanted = {"nvidia.com/gpu": "8", "memory": "900Gi", "cpu": "1500m", "rdma/ib": "4"}
        assert container["resources"] == {"requests": wanted, "limits": wanted}
        assert container["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}
        claims = {
            volume["persistentVolumeClaim"]["claimName"]: volume["name"]
            for volume in pod["volumes"]
            if "persistentVolumeClaim" in volume
        }
        places = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert places == {
            "/dev/shm": "shared-memory",
            "/shared": claims["shared"],
            "/data": claims["corpora"],
            "/again": claims["shared"],
        }
        assert pod["terminationGracePeriodSeconds"] == 90


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"experiment_name": "Toy_run"}, ("--experiment-name 'Toy_run'", "small letters")),
        ({"experiment_name": "a" * 41}, ("--experiment-name", "at most 40")),
        ({"namespace": "My"}, ("--namespace 'My'", "small letters")),
        ({"mount": ("/local:/shared",)}, ("--mount /local:/shared", "CLAIM:/PATH")),
        ({"mount": ("a:/x", "b:/x")}, ("--mount has /x twice", "own path")),
        ({"resource": {"memory": "900 GB"}}, ("--resource memory=900 GB", "memory=900Gi")),
        ({"resource": {"nvidia.com/gpu": "4"}}, ("nvidia.com/gpu=4", "--devices")),
        ({"rdma": "rdma/ib"}, ("--rdma rdma/ib", "NAME=COUNT")),
        ({"nodes": 0}, ("--nodes 0", "at least 1")),
    ],
)
def test_mistakes_are_named(changes, words):
    with pytest.raises(UserError) as found:
        manifest(dataclasses.replace(OPTIONS, **changes))
    assert all(word in str(found.value) for word in words), found.value


RECIPE = ("launch", "--recipe", "llama32_1b_pretrain_config")
CLUSTER = (*RECIPE, "--on", "kubernetes", "--container-image", "registry/bridge:1")


def test_the_command_writes_a_manifest(tmp_path, capsys):
    file = tmp_path / "run.yaml"
    words = ("--nodes", "2", "--devices", "4", "--output", str(file), "checkpoint.save=/shared/run")
    assert main.main([*CLUSTER, *words]) == 0
    assert f"kubectl apply -f {file}" in capsys.readouterr().out
    found = yaml.safe_load(file.read_text())
    (pod,) = pods(found)
    tail = ["train", "--recipe", "llama32_1b_pretrain_config", "checkpoint.save=/shared/run"]
    assert pod["containers"][0]["command"][-4:] == tail
    assert found["metadata"] == {"name": "llama32-1b-pretrain-config"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((*RECIPE, "--on", "kubernetes"), ("needs --container-image",)),
        ((*CLUSTER, "--partition", "gpu"), ("--on kubernetes takes no --partition",)),
        ((*CLUSTER, "--local", "--dry-run"), ("--dry-run, --local",)),
        ((*RECIPE, "--kind", "jobset"), ("--on slurm takes no --kind",)),
        (
            (*CLUSTER, "--devices", "7", "model.tensor_model_parallel_size=2"),
            ("needs 2 processes", "start 6 or 8"),
        ),
        ((*CLUSTER, "--resource", "memory"), ("--resource memory", "NAME=VALUE")),
        (
            (*CLUSTER[:-1], "registry/bridge:1\ncommand: [sh]"),
            ("--container-image 'registry/bridge:1\\ncommand: [sh]'", "line break"),
        ),
        ((*CLUSTER[:-1], "a b"), ("--container-image 'a b' is not the name of an image",)),
        ((*CLUSTER, "--mount", "claim:/a\nb"), ("--mount 'claim:/a\\nb'", "line break")),
        ((*CLUSTER, "--env", "A\nB=1"), ("--env 'A\\nB'", "name of a variable")),
        ((*CLUSTER, "--rdma", "rdma/ib=4\n"), ("--rdma 'rdma/ib=4\\n'", "line break")),
    ],
)
def test_mistakes_of_the_command_are_named(capsys, arguments, words):
    assert main.main(list(arguments)) == 1
    errors = capsys.readouterr().err
    assert all(word in errors for word in words), errors
