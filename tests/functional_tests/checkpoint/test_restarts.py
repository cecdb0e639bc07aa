# SPDX-License-Identifier: Apache-2.0
"""Restarts and saves by nvidia-resiliency-ext: the run is the undisturbed one."""

import importlib.util
import json
import os
import pickle
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from megatron.bridge.checkpoint import manifest, verification
from megatron.bridge.checkpoint import paths as layout
from megatron.bridge.utils.processes import free_port
from tests.functional_tests.checkpoint.restarts import PLAIN
from tests.functional_tests.checkpoint.runs import STEPS, run_to, tensors_of

REPOSITORY = Path(__file__).parents[3]
BESIDE = REPOSITORY / ".cache/resiliency"  # where scripts/extra.sh installs it
JOB = "tests.functional_tests.checkpoint.restarts"
TIMEOUTS = ("setup:60", "step:10", "checkpointing:30")

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("nvidia_resiliency_ext") is None and not BESIDE.is_dir(),
    reason="nvidia-resiliency-ext is not installed: run scripts/extra.sh resiliency",
)


@pytest.fixture(scope="module")
def undisturbed(two_workers):
    return two_workers.run(run_to, None, STEPS, PLAIN)


def _environment(**more):
    paths = [str(BESIDE), str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    kept = {
        key: value
        for key, value in os.environ.items()
        if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    return {**kept, "PYTHONPATH": os.pathsep.join(paths), "TORCH_CPP_LOG_LEVEL": "error", **more}


def _within(folder, kind):
    """Two ranks without a launcher; what each says."""
    port = free_port(3)
    ranks = []
    for rank in "01":
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        ranks.append(
            subprocess.Popen(
                [sys.executable, "-m", JOB, kind, str(folder)],
                env=_environment(**place, MASTER_PORT=str(port)),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        return [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


def _results(folder):
    return [pickle.loads((folder / str(rank)).read_bytes()) for rank in range(2)]


def _assert_same(results, undisturbed):
    for rank, (result, _) in enumerate(results):
        differing = {name for name in result if result[name] != undisturbed[rank][name]}
        if "digest" in differing:
            ours, theirs = result["digest"], undisturbed[rank]["digest"]
            differing |= {name for name in ours if ours[name] != theirs[name]}
        assert not differing, rank


@pytest.mark.parametrize(
    ("kind", "resumed"), [pytest.param("exception", 3, marks=pytest.mark.slow), ("in_memory", 4)]
)
def test_a_rank_that_fails_restarts_all_in_their_processes(tmp_path, undisturbed, kind, resumed):
    said = _within(tmp_path, kind)
    assert (tmp_path / "0").exists(), said
    results = _results(tmp_path)
    _assert_same(results, undisturbed)
    assert [started for _, started in results] == [[0, resumed]] * 2
    assert "restart 1 within the processes" in said[0]


@pytest.mark.slow  # two minutes each: the launcher starts all processes anew
@pytest.mark.parametrize("kind", ["rank_killed", "rank_hung"])
def test_the_launcher_restarts_what_was_killed_or_hangs(tmp_path, undisturbed, kind):
    command = [sys.executable, "-m", "nvidia_resiliency_ext.fault_tolerance.launcher"]
    command += ["--nnodes=1", "--nproc-per-node=2", "--max-restarts=2", "--rdzv-backend=c10d"]
    command += [f"--rdzv-endpoint=127.0.0.1:{free_port(3)}", "--monitor-interval=0.2"]
    command += [
        f"--ft-rank-section-timeouts={','.join(TIMEOUTS)}",
        "--ft-workload-check-interval=0.5",
    ]
    command += ["--ft-rank-out-of-section-timeout=60", "-m", JOB, kind, str(tmp_path)]
    done = subprocess.run(
        command,
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=400,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    _assert_same(_results(tmp_path), undisturbed)
    happened = json.loads((tmp_path / "run" / "simulated_fault.json").read_text())
    assert happened["rank"] == 1
    assert happened["signal"] == {"rank_killed": "SIGKILL", "rank_hung": "SIGSTOP"}[kind]


@pytest.mark.slow  # half a minute; the test below saves in this way in every run of the tests
def test_its_writing_process_makes_the_same_checkpoints(two_workers, tmp_path):
    plain = {**PLAIN, "checkpoint": {"save_interval": 2}}
    expected = two_workers.run(run_to, tmp_path / "plain", STEPS, plain)
    said = _within(tmp_path, "in_background")
    assert (tmp_path / "0").exists(), said
    results = _results(tmp_path)
    _assert_same(results, expected)
    assert [saved for _, saved in results] == [[2, 4, 6]] * 2
    for step in (2, 4, 6):
        directory = layout.iteration_dir(tmp_path / "run", step)
        verification.verify(directory)
        whole = tensors_of(layout.iteration_dir(tmp_path / "plain", step))
        found = tensors_of(directory)
        assert all(torch.equal(found[key], value) for key, value in whole.items())
    shard = next(layout.iteration_dir(tmp_path / "run", 6).glob("__0_*.distcp"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    with pytest.raises(manifest.DamagedError, match=shard.name):
        verification.verify(shard.parent)
    resumed = two_workers.run(
        run_to, tmp_path / "run", STEPS, plain
    )  # from the one before the damaged one
    assert resumed == expected


def test_its_writing_process_that_fails_or_is_killed_publishes_nothing(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "tests.functional_tests.checkpoint.nvrx_saves", str(tmp_path)],
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    said = json.loads(done.stdout)
    psutil.wait_procs(
        [psutil.Process(pid) for pid in said["processes"] if psutil.pid_exists(pid)], timeout=10
    )
    assert not any(map(psutil.pid_exists, said.pop("processes"))), (
        "they end with the rank, even if it is killed"
    )
    assert re.search(r"iter_0000003 cannot be written: File too large", said.pop("no space"))
    assert "was killed" in said.pop("killed")
    assert said == {
        "saved": [1.0],
        "saved again": [2.0],
        "terminated": [
            4.0
        ],  # a launcher's SIGTERM goes to the whole group: what was begun is finished
        "after that": [6.0],
        "folders": ["iter_0000001", "iter_0000002", "iter_0000004", "iter_0000006"],
    }
