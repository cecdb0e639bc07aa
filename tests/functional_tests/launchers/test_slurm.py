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
NEMO_RUN = pytest.mark.skipif(
    not LAUNCHER.exists(), reason="no .venv-launch: run `make launch-setup`"
)
STEPS = 6
TOY = [
    *("--recipe", "llama32_1b_pretrain_config", "--seq-length", "32"),
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

WAITING = ["--step-func", "tests.functional_tests.launchers.waiting_step.forward_step"]


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
def undisturbed(two_workers, tmp_path_factory):
    """The same run, on two ranks, that nobody disturbs."""
    folder = tmp_path_factory.mktemp("undisturbed")
    assert two_workers.run(main, ["train", *TOY, *saving(folder)]) == [0, 0]
    return folder


def saving(folder):
    return [f"checkpoint.save={folder}/run", f"logger.log_dir={folder}/log"]


def losses(folder):
    path = folder / "log" / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {line["step"]: line["lm loss"] for line in lines if "lm loss" in line}


def preempt_and_finish(slurm, job, folder):
    """Tell the running job to leave after three steps, and wait until it has started again and is done."""
    slurm.wait_for(lambda: max(losses(folder), default=0) == 3, "third step", 600)
    slurm.run("scancel", "--signal=TERM", job)
    slurm.wait_for(
        lambda: slurm.state(job) in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"), "end", 600
    )
    assert slurm.state(job) == "COMPLETED"
    assert "Restarts=1" in slurm.run("scontrol", "show", "job", job)


def assert_equal(folder, undisturbed, steps=STEPS):
    """Every loss, and every byte of the last checkpoint's tensors."""
    assert losses(folder) == losses(undisturbed)
    assert max(losses(folder)) == steps
    assert (
        main(["checkpoint", "diff", str(folder / "run"), str(undisturbed / "run"), "--values"]) == 0
    )


def sbatch(slurm, folder, *words, options=(), **environment):
    """The number of a job of ``launch_with_sbatch.sh`` with two tasks a node, which writes into ``folder``."""
    script = str(ROOT / "scripts/training/launch_with_sbatch.sh")
    own = [
        *slurm.login,
        "sbatch",
        "--parsable",
        "--ntasks-per-node=2",
        f"--output={folder}/out.txt",
        *options,
        script,
    ]
    done = subprocess.run(
        [*own, *words, *saving(folder)],
        cwd=ROOT,
        env={**slurm.environment, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_a_preempted_batch_job_goes_on_bitwise(slurm, undisturbed, tmp_path):
    preempt_and_finish(slurm, sbatch(slurm, tmp_path, *WAITING, *TOY), tmp_path)
    assert_equal(tmp_path, undisturbed)
    assert "requeued" in (tmp_path / "out.txt").read_text()


def launch(slurm, folder, *words):
    """``launch_with_nemo_run.py``, from the repository, with job folders under ``folder``."""
    done = subprocess.run(
        [
            *(slurm.login if slurm else []),
            str(LAUNCHER),
            "scripts/training/launch_with_nemo_run.py",
            *words,
        ],
        cwd=ROOT,
        env={**(slurm.environment if slurm else os.environ), "NEMORUN_HOME": str(folder / "jobs")},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


@NEMO_RUN
@pytest.mark.parametrize("launcher", ["torchrun", pytest.param("default", marks=pytest.mark.slow)])
def test_a_preempted_job_of_nemo_run_goes_on_bitwise(slurm, undisturbed, tmp_path, launcher):
    options = [
        "--cpu",
        "--devices",
        "2",
        "--time",
        "00:30:00",
        "--retries",
        "1",
        "--launcher",
        launcher,
    ]
    done = launch(slurm, tmp_path, *options, *WAITING, *TOY, *saving(tmp_path))
    job = re.search(r"submitted batch job (\d+)", done.stdout)
    assert job
    preempt_and_finish(slurm, job[1], tmp_path)
    assert_equal(tmp_path, undisturbed)
    [folder] = (tmp_path / "jobs" / "experiments").glob("*/*")
    kept = {path.name for path in folder.iterdir()}
    assert kept >= {
        "launch.yaml",
        "launch_again.sh",
        "config.yaml",
        "versions.txt",
        "train_sbatch.sh",
    }
    assert (folder / "train/code/src/megatron/bridge/version.py").exists()


@NEMO_RUN
@pytest.mark.slow
@pytest.mark.skipif(
    not RESILIENCY.exists(), reason="no nvidia-resiliency-ext: run scripts/extra.sh resiliency"
)
def test_a_job_under_ft_launcher_ends_like_the_undisturbed(slurm, undisturbed, tmp_path):
    path = f"{RESILIENCY}/bin:{LAUNCHER.parent}:{slurm.environment['PATH']}"
    where = [
        "--cpu",
        "--devices",
        "2",
        "--time",
        "00:30:00",
        "--env",
        f"PATH={path}",
        "--packager",
        "none",
    ]
    done = launch(
        slurm,
        tmp_path,
        "--launcher",
        "ft",
        *where,
        "--env",
        f"PYTHONPATH={RESILIENCY}",
        *TOY,
        *saving(tmp_path),
    )
    job = re.search(r"submitted batch job (\d+)", done.stdout)
    assert job
    slurm.wait_for(lambda: slurm.state(job[1]) in ("COMPLETED", "FAILED"), "end", 600)
    assert slurm.state(job[1]) == "COMPLETED"
    assert_equal(tmp_path, undisturbed)


REFUSED = {
    "--partition tyo does not exist; did you mean toy?": ["--partition", "tyo"],
    "--time 2-00 is more than partition toy allows, which is 1:00:00": ["--time", "2-00"],
    "--remote-job-dir /sys/jobs cannot be written": ["--remote-job-dir", "/sys/jobs"],
    "/etc is not in a git repository": ["--packager", "git", "--script", "/etc/hostname"],
    "--script no.py does not exist": ["--script", "no.py"],
    "--nodes 0 is not possible": ["--nodes", "0"],
    "--env lower: the name must be capital letters": ["--env", "lower=1"],
    "--no-detach follows jobs through sacct, which says": ["--no-detach"],
    "--host needs --ssh-tunnel": ["--host", "login"],
    "did you mean --partition": ["--parttion", "toy"],
    "train.global_batch_size=2 is not a multiple": ["train.micro_batch_size=4"],
    "Slurm refuses the job: ": ["--nodes", "2"],
    "Slurm refuses the job: Invalid generic resource": ["--gres", "gpu:8"],
}

# Runs `launch` once for each list of words, in one process, which imports NeMo-Run once.
IN_A_ROW = """
import json, os, subprocess, sys, tempfile
from megatron.bridge.cli.main import main

def said(words):
    kept = os.dup(1), os.dup(2)
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        os.dup2(out.fileno(), 1), os.dup2(err.fileno(), 2)
        try:
            code = main(["launch", *words])
        except SystemExit as end:
            code = end.code
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            os.dup2(kept[0], 1), os.dup2(kept[1], 2)
        out.seek(0), err.seek(0)
        return code, out.read(), err.read(), queued()

def queued():
    slurm = "SLURM_CONF" in os.environ
    return subprocess.check_output(["squeue", "--noheader"], text=True).strip() if slurm else ""

print(json.dumps([said(words) for words in json.load(sys.stdin)]))
"""


def in_a_row(slurm, folder, rows):
    """(exit code, standard output, errors, what is queued) of ``launch`` for each list of words."""
    done = subprocess.run(
        [str(LAUNCHER), "-c", IN_A_ROW],
        cwd=ROOT,
        env={**(slurm.environment if slurm else os.environ), "NEMORUN_HOME": str(folder / "jobs")},
        input=json.dumps(rows),
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    assert not list((folder / "jobs" / "experiments").glob("*/*"))
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def refused(slurm, tmp_path_factory):
    """What ``launch`` says to each row."""
    folder = tmp_path_factory.mktemp("refused")
    start = ["--cpu", "--time", "00:30:00", *TOY, *saving(folder)]
    said = in_a_row(slurm, folder, [[*start, *words] for words in REFUSED.values()])
    return dict(zip(REFUSED, said, strict=True))


@NEMO_RUN
@pytest.mark.parametrize("sentence", REFUSED)
def test_bad_input_is_named_and_nothing_is_queued(refused, sentence):
    code, _, errors, queued = refused[sentence]
    assert code != 0
    assert sentence in errors
    assert "Traceback" not in errors
    assert queued == ""


@NEMO_RUN
def test_without_slurm_a_host_that_does_not_answer_is_named_and_a_dry_run_prints_the_script(
    tmp_path,
):
    tunnel = [
        "--ssh-tunnel",
        "--host",
        "127.0.0.1",
        "--user",
        "nobody",
        "--remote-job-dir",
        str(tmp_path),
    ]
    where = [
        "--dry-run",
        "--nodes",
        "2",
        "--account",
        "a",
        "--time",
        "08:00:00",
        "--container-image",
        "image",
    ]
    (code, _, errors, _), dry_run = in_a_row(
        None, tmp_path, [[*tunnel, *TOY], [*where, *TOY, *saving(tmp_path)]]
    )
    assert code == 1
    assert "--host 127.0.0.1 cannot be reached by SSH" in errors
    assert dry_run[0] == 0
    for line in (
        "#SBATCH --account=a",
        "#SBATCH --nodes=2",
        "#SBATCH --gpus-per-node=1",
        "--nproc-per-node 1",
    ):
        assert line in dry_run[1]
    assert "--container-image image" in dry_run[1]


@NEMO_RUN
def test_a_local_launch_runs_here_and_tells_how_it_ended(tmp_path):
    toy = ["train.train_iters=2" if word.startswith("train.train_iters") else word for word in TOY]
    done = launch(None, tmp_path, "--local", "--devices", "2", *toy, *saving(tmp_path))
    assert max(losses(tmp_path)) == 2
    assert "step 2/2" in done.stdout + done.stderr


@NEMO_RUN
def test_a_local_launch_that_is_told_to_leave_leaves_nothing_running(tmp_path):
    command = [
        str(LAUNCHER),
        "scripts/training/launch_with_nemo_run.py",
        "--local",
        "--devices",
        "2",
        *WAITING,
    ]
    toy = [
        f"train.train_iters={10**5 + os.getpid()}" if "train_iters" in word else word
        for word in TOY
    ]
    [mark] = [word for word in toy if "train_iters" in word]
    env = {**os.environ, "NEMORUN_HOME": str(tmp_path / "jobs")}
    process = subprocess.Popen(
        [*command, *toy, *saving(tmp_path)], cwd=ROOT, env=env, stdout=subprocess.DEVNULL
    )
    wait_until(lambda: len(losses(tmp_path)) == 3, 600)
    process.terminate()
    assert process.wait(600) == 1
    wait_until(lambda: not running(mark), 600)


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
