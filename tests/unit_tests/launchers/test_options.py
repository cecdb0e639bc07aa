# SPDX-License-Identifier: Apache-2.0
"""What contradicts what, and what is asked of Slurm before anything is queued."""

import dataclasses
from pathlib import Path

import pytest

from megatron.bridge.launchers import job_folder, preflight
from megatron.bridge.launchers.options import LaunchOptions
from megatron.bridge.launchers.preflight import ShellResult
from megatron.bridge.utils.errors import UserError
from megatron.bridge.utils.torchrun_env import adopt_slurm_step, first_host

OPTIONS = LaunchOptions(
    local=False,
    script=Path("run_recipe.py"),
    arguments=("--recipe", "r", "a.b=[1, 2]"),
    experiment_name="toy",
    launcher="torchrun",
    devices=2,
    nodes=1,
    cpu=False,
    partition=None,
    account=None,
    time="01:00:00",
    preempt_time=120,
    gres=None,
    retries=0,
    chain=1,
    ssh_tunnel=False,
    host=None,
    user=None,
    identity=None,
    remote_job_dir=None,
    container_image=None,
    mount=(),
    venv=None,
    packager="pattern",
    env={},
    perf_env=True,
    nsys=False,
    dry_run=False,
    detach=True,
    tail_logs=False,
)


def changed(**fields):
    return dataclasses.replace(OPTIONS, **fields)


def test_a_plain_launch_is_fine():
    OPTIONS.validate()
    changed(local=True).validate()


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"devices": 0}, "--devices 0 is not possible"),
        (
            {"partition": "gpu\n#SBATCH --uid=0"},
            "--partition 'gpu\\n#SBATCH --uid=0' has a line break",
        ),
        (
            {"container_image": "image\n", "mount": ("a:b",)},
            "--container-image 'image\\n' has a line break",
        ),
        ({"executor": {"setup_lines": ["a\rb"]}}, "--executor 'a\\rb' has a line break"),
        ({"experiment_name": "a b"}, "--experiment-name 'a b' names a folder"),
        ({"time": "4h"}, "--time 4h is not a duration"),
        ({"env": {"path": "x"}}, "--env path: the name must be capital letters"),
        ({"local": True, "partition": "gpu"}, "--partition belongs to a cluster"),
        ({"local": True, "retries": 2}, "--retries belongs to a cluster"),
        ({"local": True, "nodes": 2}, "--local runs on this machine alone"),
        ({"local": True, "nsys": True}, "--nsys profiles jobs of a cluster"),
        ({"local": True, "launcher": "default"}, "--launcher default starts one process here"),
        ({"ssh_tunnel": True}, "--ssh-tunnel needs --host"),
        ({"user": "me"}, "--user needs --ssh-tunnel"),
        ({"mount": ("a:b",)}, "--mount needs --container-image"),
        ({"venv": Path("v"), "container_image": "i"}, "two places to run in"),
        (
            {
                "packager": "none",
                "ssh_tunnel": True,
                "host": "h",
                "user": "u",
                "remote_job_dir": Path("/d"),
            },
            "must be an absolute path of the cluster",
        ),
    ],
)
def test_contradictions_are_named(fields, sentence):
    with pytest.raises(UserError) as error:
        changed(**fields).validate()
    assert sentence in str(error.value)


def test_all_contradictions_are_told_at_once():
    with pytest.raises(UserError) as error:
        changed(devices=0, time="x", mount=("a:b",)).validate()
    assert len(str(error.value).splitlines()) == 3


def cluster(limits, refusal=None):
    """A shell that answers as a cluster with these partitions does."""
    answer = ShellResult(0, "") if refusal is None else ShellResult(1, refusal)
    return lambda command: ShellResult(0, limits) if command.startswith("sinfo") else answer


@pytest.mark.parametrize(
    ("fields", "limits", "sentence"),
    [
        ({}, "gpu 1:00:00\n", "no default partition"),
        (
            {"partition": "gpus"},
            "gpu* 1:00:00\n",
            "--partition gpus does not exist; did you mean gpu?",
        ),
        (
            {"time": "1-00:00:00"},
            "gpu* 12:00:00\n",
            "more than partition gpu allows, which is 12:00:00",
        ),
    ],
)
def test_partitions_and_limits_are_checked(fields, limits, sentence):
    with pytest.raises(UserError, match=sentence.replace("?", r"\?")):
        preflight.check_cluster(changed(**fields), cluster(limits))


def test_a_partition_without_limit_takes_any_job():
    preflight.check_cluster(changed(time="30-00:00:00"), cluster("gpu* infinite\n"))


def test_what_slurm_says_becomes_one_sentence_with_a_way_out():
    text = "sbatch: error: Batch job submission failed\nallocation failure: Invalid account or account/partition\n"
    with pytest.raises(UserError) as error:
        preflight.check_scripts({"a": "#!/bin/bash"}, cluster("", text))
    expected = (
        "Slurm refuses the job: Invalid account or account/partition; name yours with --account"
    )
    assert str(error.value) == expected


@pytest.mark.parametrize(
    ("limit", "expected"),
    [("90", 5400), ("30:15", 1815), ("4:00:00", 14400), ("1-12", 129600), ("2-0:30", 174600)],
)
def test_limits_in_every_form_of_slurm(limit, expected):
    assert preflight.seconds(limit) == expected


def test_the_folder_says_how_to_launch_again(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["launch.py", "--env", "A=b c", "a.b=[1, 2]"])
    job_folder.write_job_folder(tmp_path, OPTIONS, ("7",), "train: {}\n")
    again = (tmp_path / "launch_again.sh").read_text()
    assert "launch.py --env 'A=b c' 'a.b=[1, 2]' \"$@\"" in again
    assert "jobs:\n- '7'" in (tmp_path / "launch.yaml").read_text()
    assert "torch==" in (tmp_path / "versions.txt").read_text()


def test_a_task_of_srun_is_given_its_rank():
    step = {
        "SLURM_PROCID": "5",
        "SLURM_LOCALID": "1",
        "SLURM_STEP_NUM_TASKS": "8",
        "SLURM_STEP_NODELIST": "rack[1-2]gpu[03-04]",
        "SLURM_JOB_ID": "77",
    }
    adopt_slurm_step(step)
    assert (step["RANK"], step["LOCAL_RANK"], step["WORLD_SIZE"]) == ("5", "1", "8")
    assert step["MASTER_ADDR"] == "rack1gpu03"
    other = {**step, "SLURM_RESTART_COUNT": "1"}
    for name in ("RANK", "MASTER_PORT"):
        del other[name]
    adopt_slurm_step(other)
    assert other["MASTER_PORT"] != step["MASTER_PORT"]


@pytest.mark.parametrize(
    "environment",
    [
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "7"},  # the batch script itself
        {
            "SLURM_PROCID": "0",
            "SLURM_STEP_NUM_TASKS": "1",
            "SLURM_JOB_ID": "7",
        },  # srun -n1 torchrun
        {"RANK": "3", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"},
    ],
)
def test_other_processes_are_left_alone(environment):
    before = dict(environment)
    adopt_slurm_step(environment)
    assert environment == before


def test_a_part_of_a_step_is_refused():
    environment = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}
    with pytest.raises(UserError, match="SLURM_LOCALID is missing in the environment, although"):
        adopt_slurm_step(environment)
    assert "RANK" not in environment


def test_first_host_of_plain_names():
    assert first_host("login1,gpu[1-2]") == "login1"
