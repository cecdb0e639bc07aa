# SPDX-License-Identifier: Apache-2.0
"""A real Slurm of one node: train on two ranks, be told to leave, be queued again, finish, bitwise equal."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.bridge.cli.main import main
from tests.functional_tests.launchers.slurm_node import SlurmNode, missing

ROOT = Path(__file__).parents[3]
LAUNCHER = ROOT / ".venv-launch/bin/python"
RESILIENCY = ROOT / ".cache/resiliency"
NEMO_RUN = pytest.mark.skipif(not LAUNCHER.exists(), reason="no .venv-launch: run `make launch-setup`")
STEPS = 12
TOY = [
    *("--recipe", "llama32_1b_pretrain_config", "--seq_length", "32"),
    *("--step_func", "tests.functional_tests.launchers.slow_step.forward_step"),
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.num_attention_heads=4",
    "model.num_query_groups=2",
    "model.kv_channels=8",
    "model.ffn_hidden_size=64",
    "model.vocab_size=128",
    "tokenizer.vocab_size=128",
    f"train.train_iters={STEPS}",
    "train.global_batch_size=2",
    "validation.eval_iters=0",
    "logger.log_interval=1",
    "mixed_precision=fp32",
    "checkpoint.save_interval=100",
]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    if reason := missing():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("slurm")
    folder.chmod(0o755)
    node = SlurmNode(folder)
    try:
        node.__enter__()
    except AssertionError as error:
        pytest.skip(f"Slurm does not start on this machine: {error}")
    yield node
    node.__exit__()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The same run, on two ranks of torchrun, that nobody disturbs."""
    folder = tmp_path_factory.mktemp("undisturbed")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "scripts/training/run_recipe.py",
    ]
    words = [*command, *TOY, *saving(folder)]
    done = subprocess.run(words, cwd=ROOT, check=False, timeout=200, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def saving(folder):
    return [f"checkpoint.save={folder}/run", f"logger.log_dir={folder}/log"]


def losses(folder):
    path = folder / "log" / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {line["step"]: line["lm loss"] for line in lines if "lm loss" in line}


def preempt_and_finish(slurm, job, folder):
    """Tell the running job to leave after a few steps, and wait until it has started again and is done."""
    slurm.wait_for(lambda: max(losses(folder), default=0) >= 3, "third step", 120)
    slurm.run("scancel", "--signal=TERM", job)
    slurm.wait_for(lambda: slurm.state(job) in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"), "end", 150)
    assert slurm.state(job) == "COMPLETED"
    assert "Restarts=1" in slurm.run("scontrol", "show", "job", job)


def assert_equal(folder, undisturbed):
    """Every loss, and every byte of the last checkpoint's tensors."""
    assert losses(folder) == losses(undisturbed)
    assert max(losses(folder)) == STEPS
    assert main(["checkpoint", "diff", str(folder / "run"), str(undisturbed / "run"), "--values"]) == 0


def test_a_preempted_batch_job_goes_on_bitwise(slurm, undisturbed, tmp_path):
    script = ROOT / "scripts/training/launch_with_sbatch.sh"
    words = ["sbatch", "--parsable", "--ntasks-per-node=2", f"--output={tmp_path}/out.txt", str(script)]
    done = subprocess.run(
        [*words, *TOY, *saving(tmp_path)],
        cwd=ROOT,
        env={**slurm.environment, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    preempt_and_finish(slurm, done.stdout.strip(), tmp_path)
    assert_equal(tmp_path, undisturbed)
    assert "queued again" in (tmp_path / "out.txt").read_text()


def launch(slurm, folder, *words, check=True):
    """``launch_with_nemo_run.py``, from the repository, with job folders under ``folder``."""
    done = subprocess.run(
        [str(LAUNCHER), "scripts/training/launch_with_nemo_run.py", *words],
        cwd=ROOT,
        env={**(slurm.environment if slurm else os.environ), "NEMORUN_HOME": str(folder / "jobs")},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert not check or done.returncode == 0, done.stderr
    return done


@NEMO_RUN
@pytest.mark.parametrize("launcher", ["torchrun", pytest.param("default", marks=pytest.mark.slow)])
def test_a_preempted_job_of_nemo_run_goes_on_bitwise(slurm, undisturbed, tmp_path, launcher):
    options = ["--cpu", "--devices", "2", "--time", "00:30:00", "--retries", "1", "--launcher", launcher]
    done = launch(slurm, tmp_path, *options, *TOY, *saving(tmp_path))
    job = re.search(r"submitted batch job (\d+)", done.stdout)
    assert job
    preempt_and_finish(slurm, job[1], tmp_path)
    assert_equal(tmp_path, undisturbed)
    [folder] = (tmp_path / "jobs" / "experiments").glob("*/*")
    kept = {path.name for path in folder.iterdir()}
    assert kept >= {"launch.yaml", "launch_again.sh", "config.yaml", "versions.txt", "train_sbatch.sh"}
    assert (folder / "train/code/src/megatron/bridge/version.py").exists()


@NEMO_RUN
@pytest.mark.slow
@pytest.mark.skipif(not RESILIENCY.exists(), reason="no nvidia-resiliency-ext: run scripts/extra.sh resiliency")
def test_a_job_under_ft_launcher_ends_like_the_undisturbed(slurm, undisturbed, tmp_path):
    path = f"{RESILIENCY}/bin:{LAUNCHER.parent}:{slurm.environment['PATH']}"
    where = ["--cpu", "--devices", "2", "--time", "00:30:00", "--env", f"PATH={path}", "--packager", "none"]
    done = launch(
        slurm, tmp_path, "--launcher", "ft", *where, "--env", f"PYTHONPATH={RESILIENCY}", *TOY, *saving(tmp_path)
    )
    job = re.search(r"submitted batch job (\d+)", done.stdout)
    assert job
    slurm.wait_for(lambda: slurm.state(job[1]) in ("COMPLETED", "FAILED"), "end", 200)
    assert slurm.state(job[1]) == "COMPLETED"
    assert_equal(tmp_path, undisturbed)


@NEMO_RUN
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--partition", "tyo"], "--partition tyo does not exist; did you mean toy?"),
        (["--time", "2-00"], "--time 2-00 is more than partition toy allows, which is 1:00:00"),
        (["--remote-job-dir", "/sys/jobs"], "--remote-job-dir /sys/jobs cannot be written"),
        (["--packager", "git", "--script", "/etc/hostname"], "/etc is not in a git repository"),
        (["--script", "no.py"], "--script no.py is not there"),
        (["--nodes", "0"], "--nodes 0 is not possible"),
        (["--env", "lower=1"], "--env lower: the name must be capital letters"),
        (["--no-detach"], "--no-detach follows jobs through sacct, which says"),
        (["--host", "login"], "--host needs --ssh-tunnel"),
        (["--parttion", "toy"], "did you mean --partition"),
        (["train.micro_batch_size=4"], "train.global_batch_size=2 is not a multiple"),
        (["--nodes", "2"], "Slurm refuses the job"),
        (["--gres", "gpu:8"], "Slurm refuses the job: Invalid generic resource"),
    ],
)
def test_bad_input_is_named_and_nothing_is_queued(slurm, tmp_path, words, sentence):
    done = launch(slurm, tmp_path, "--cpu", "--time", "00:30:00", *TOY, *saving(tmp_path), *words, check=False)
    assert done.returncode != 0
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
    assert slurm.run("squeue", "--noheader").strip() == ""


@NEMO_RUN
def test_a_host_that_does_not_answer_is_named(tmp_path):
    tunnel = ["--ssh-tunnel", "--host", "127.0.0.1", "--user", "nobody", "--remote-job-dir", str(tmp_path)]
    done = launch(None, tmp_path, *tunnel, *TOY, check=False)
    assert done.returncode == 1
    assert "--host 127.0.0.1 cannot be reached by SSH" in done.stderr


@NEMO_RUN
def test_a_dry_run_prints_the_script_and_leaves_nothing(tmp_path):
    where = ["--dry-run", "--nodes", "2", "--account", "a", "--time", "08:00:00", "--container-image", "image"]
    done = launch(None, tmp_path, *where, *TOY, *saving(tmp_path))
    for line in ("#SBATCH --account=a", "#SBATCH --nodes=2", "#SBATCH --gpus-per-node=1", "--nproc-per-node 1"):
        assert line in done.stdout
    assert "--container-image image" in done.stdout
    assert not list((tmp_path / "jobs" / "experiments").glob("*/*"))


@NEMO_RUN
def test_a_local_launch_runs_here_and_tells_how_it_ended(tmp_path):
    toy = ["train.train_iters=2" if word.startswith("train.train_iters") else word for word in TOY]
    done = launch(None, tmp_path, "--local", "--devices", "2", *toy, *saving(tmp_path))
    assert max(losses(tmp_path)) == 2
    assert "step 2/2" in done.stdout + done.stderr


@NEMO_RUN
def test_a_local_launch_that_is_told_to_leave_leaves_nothing_running(tmp_path):
    command = [str(LAUNCHER), "scripts/training/launch_with_nemo_run.py", "--local", "--devices", "2"]
    toy = [f"train.train_iters={10**5 + os.getpid()}" if "train_iters" in word else word for word in TOY]
    [mark] = [word for word in toy if "train_iters" in word]
    env = {**os.environ, "NEMORUN_HOME": str(tmp_path / "jobs")}
    process = subprocess.Popen([*command, *toy, *saving(tmp_path)], cwd=ROOT, env=env, stdout=subprocess.DEVNULL)
    wait_until(lambda: losses(tmp_path), 120)
    process.terminate()
    assert process.wait(60) == 1
    wait_until(lambda: not running(mark), 30)


def wait_until(condition, seconds):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.2)


def running(word):
    """Processes with ``word`` in their command line."""
    return [path for path in Path("/proc").glob("[0-9]*/cmdline") if word in read(path)]


def read(path):
    try:
        return path.read_text()
    except OSError:  # it ended meanwhile
        return ""
