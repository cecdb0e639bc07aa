# SPDX-License-Identifier: Apache-2.0
"""``launch --on``: what each target takes, what it needs, and the requests that NeMo-Run builds for it."""

import json
import subprocess
from dataclasses import fields
from importlib import util

import pytest
import yaml

from megatron.bridge.cli import launch, main
from megatron.bridge.cli.support.parser import Parser
from megatron.bridge.launchers.options import LaunchOptions
from megatron.bridge.launchers.targets import TARGETS
from tests.unit_tests.project.tree import ROOT

RECIPE = ("launch", "--recipe", "llama32_1b_pretrain_config")
LAUNCHER = ROOT / ".venv-launch/bin/python"
WITH_KUBERNETES = pytest.mark.skipif(
    not list(ROOT.glob(".venv-launch/lib/*/site-packages/kubernetes")),
    reason="needs `pip install kubernetes` in .venv-launch",
)
NEMO_RUN = pytest.mark.skipif(
    not LAUNCHER.exists(), reason="no .venv-launch: run `make launch-setup`"
)


def launch_options():
    """Option of ``launch`` without dashes -> its action."""
    parser = Parser()
    launch.add_arguments(parser)
    return {action.dest: action for action in parser._actions if action.option_strings}


OPTIONS = launch_options()


@pytest.fixture
def with_modules(monkeypatch):
    """As if the modules of all targets were installed."""
    found, names = util.find_spec, {target.module for target in TARGETS.values()}
    monkeypatch.setattr(
        util, "find_spec", lambda name, *rest: name if name in names else found(name, *rest)
    )


def test_rows_name_options_that_exist():
    refused = {name for target in TARGETS.values() for name in target.refused}
    assert refused <= OPTIONS.keys()
    mapped = {name for target in TARGETS.values() for name in target.options}
    assert mapped <= {"gpus", *(field.name for field in fields(LaunchOptions))}
    assert OPTIONS["on"].choices == list(TARGETS)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["docker", "--nodes", "2"],
            "--on docker takes no --nodes: leave that out, or change --on",
        ),
        (
            ["docker", "--partition", "a", "--rdma", "b=1"],
            "--on docker takes no --rdma, --partition: ",
        ),
        (["ray", "--executor", "a=1"], "--on ray takes no --executor: "),
        (["slurm", "--executor", "a=1"], "--on slurm takes no --executor: "),
        (["docker", "--executor", "a"], "--executor a has no value: write NAME=VALUE"),
    ],
)
def test_what_a_target_does_not_take_is_named(capsys, with_modules, words, sentence):
    assert main.main([*RECIPE, "--on", *words]) == 1
    assert sentence in capsys.readouterr().err


def test_an_unknown_target_is_refused(capsys):
    with pytest.raises(SystemExit):
        main.main([*RECIPE, "--on", "slrum"])
    assert "invalid choice: 'slrum' (choose from " in capsys.readouterr().err


@pytest.mark.parametrize(
    "target", [name for name, target in TARGETS.items() if target.module is not None]
)
def test_a_missing_module_is_named_with_what_installs_it(capsys, monkeypatch, target):
    monkeypatch.setattr(util, "find_spec", lambda name, *rest: None)
    assert main.main([*RECIPE, "--on", target]) == 1
    error = capsys.readouterr().err
    assert (
        f"--on {target} needs the module {TARGETS[target].module}, which is not installed: pip install"
        in error
    )


def test_a_dry_run_for_ray_tells_what_starts(capsys, with_modules):
    assert main.main([*RECIPE, "--on", "ray", "--nodes", "2", "--devices", "4", "--dry-run"]) == 0
    assert "on ray: 2 x 4 processes, started by torchrun" in capsys.readouterr().out


def in_a_row(rows):
    """(exit code, standard output, errors) of a dry run for each list of words, in one process with NeMo-Run."""
    code = """
import contextlib, io, json, sys
from megatron.bridge.cli.main import main
def said(words):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        return main(words), out.getvalue(), err.getvalue()
print(json.dumps([said(words) for words in json.load(sys.stdin)]))
"""
    rows = json.dumps([[*RECIPE, "--dry-run", *words] for words in rows])
    done = subprocess.run(
        [LAUNCHER, "-c", code], input=rows, cwd=ROOT, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


@NEMO_RUN
def test_requests_of_nemo_run(monkeypatch):
    image = ["--container-image", "registry/bridge:1"]
    lepton = [
        "nemo_run_dir=/jobs",
        "node_group=g",
        "resource_shape=gpu.8xh100",
        "mounts=[{path: /, mount_path: /jobs}]",
    ]
    dgx = [
        "base_url=https://dgx/api",
        "kube_apiserver_url=https://dgx",
        "client_id=me",
        "project_name=p",
    ]
    dgx += ["pvc_nemo_run_dir=/jobs", "pvcs=[{name: x, path: /jobs}]"]
    monkeypatch.setenv("DGXCLOUD_CLIENT_SECRET", "no-one-reads-this")
    docker, cpu, no_image, misspelt, far, poor, cloud, told = in_a_row(
        [
            [
                "--on",
                "docker",
                *image,
                "--devices",
                "2",
                "--mount",
                "/a:/b",
                "--executor",
                "shm_size=30g",
                "a.b=c d",
            ],
            ["--on", "docker", *image, "--cpu", "--env", "A=1"],
            ["--on", "docker"],
            ["--on", "docker", *image, "--executor", "shm_siz=1"],
            [
                "--on",
                "lepton",
                *image,
                "--nodes",
                "2",
                *(word for pair in lepton for word in ("--executor", pair)),
            ],
            ["--on", "lepton"],
            [
                "--on",
                "dgxcloud",
                *image,
                "--nodes",
                "2",
                *(word for pair in dgx for word in ("--executor", pair)),
            ],
            ["--on", "dgxcloud", *image, "--executor", "client_secret=a"],
        ]
    )
    assert docker[0] == 1  # the config is checked
    assert "a.b" in docker[2]
    request = yaml.load(cpu[1].partition("\n")[2], yaml.SafeLoader)
    [container] = request["containers"]
    assert container["command"][0] == "torchrun"
    assert container["executor"]["num_gpus"] == 0
    assert container["executor"]["env_vars"] == {"A": "1", "PYTHONPATH": "/nemo_run/code/src"}
    assert "--on docker needs --container-image" in no_image[2]
    assert (
        "--executor shm_siz: DockerExecutor has no such field; did you mean shm_size?"
        in misspelt[2]
    )
    assert "--nnodes 2" in far[1]
    assert "project_name='p'" in cloud[1]
    assert "client_secret='$DGXCLOUD_CLIENT_SECRET'" in cloud[1]
    assert "no-one-reads-this" not in cloud[1]
    assert "--executor client_secret: DGXCloudExecutor has no such field" in told[2]
    assert "--on lepton needs --container-image and --executor nemo_run_dir=PATH and" in poor[2]


@WITH_KUBERNETES
def test_the_manifest_for_kubeflow(tmp_path, monkeypatch):
    config = {
        "kind": "Config",
        "current-context": "x",
        "contexts": [{"name": "x", "context": {"cluster": "c"}}],
    }
    config |= {
        "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}],
        "users": [],
    }
    (tmp_path / "config").write_text(yaml.safe_dump(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    words = [
        "--on",
        "kubeflow",
        "--container-image",
        "registry/bridge:1",
        "--nodes",
        "2",
        "--devices",
        "8",
    ]
    [[code, text, _]] = in_a_row([[*words, "--executor", "workdir_pvc=jobs"]])
    assert code == 0
    job = yaml.safe_load(text.partition("\n")[2])
    assert job["kind"] == "TrainJob"
    trainer = job["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"], trainer["image"]) == (
        2,
        8,
        "registry/bridge:1",
    )
    assert trainer["resourcesPerNode"]["limits"] == {"nvidia.com/gpu": "8"}
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "nothing"))
    [[code, _, error]] = in_a_row([[*words, "--executor", "workdir_pvc=jobs"]])
    assert code == 1
    assert "--on kubeflow: NeMo-Run's KubeflowExecutor says: Invalid kube-config file" in error
