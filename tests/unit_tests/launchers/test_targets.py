# SPDX-License-Identifier: Apache-2.0
"""``launch --on``: what each target takes, what it needs, and the requests that NeMo-Run builds for it."""

import json
import subprocess
from importlib import util

import pytest
import yaml

from megatron.bridge.cli import launch, main
from megatron.bridge.cli.support.parser import Parser
from megatron.bridge.launchers.targets import TARGETS
from tests.unit_tests.project.tree import ROOT

RECIPE = ("launch", "--recipe", "llama32_1b_pretrain_config")
LAUNCHER = ROOT / ".venv-launch/bin/python"
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
def test_requests_of_nemo_run():
    image = ["--container-image", "registry/bridge:1"]
    volume = ["--mount", "/a:/b"]
    unknown_key, cpu, no_image, misspelt = in_a_row(
        [
            ["--on", "docker", *image, "--devices", "2", *volume, "a.b=c d"],
            [
                *["--on", "docker", *image, "--cpu", "--env", "A=1", *volume],
                *["--executor", "shm_size=30g"],
            ],
            ["--on", "docker"],
            ["--on", "docker", *image, "--executor", "shm_siz=1"],
        ]
    )
    assert unknown_key[0] == 1  # the config is checked
    assert "a.b" in unknown_key[2]
    request = yaml.load(cpu[1].partition("\n")[2], yaml.SafeLoader)
    [container] = request["containers"]
    assert container["command"][0] == "torchrun"
    assert container["executor"]["num_gpus"] == 0
    assert container["executor"]["shm_size"] == "30g"
    assert container["executor"]["volumes"][0] == "/a:/b"
    assert container["executor"]["env_vars"] == {"A": "1", "PYTHONPATH": "/nemo_run/code/src"}
    assert "--on docker needs --container-image" in no_image[2]
    assert (
        "--executor shm_siz: DockerExecutor has no such field; did you mean shm_size?"
        in misspelt[2]
    )
