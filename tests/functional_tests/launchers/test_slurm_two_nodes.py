# SPDX-License-Identifier: Apache-2.0
"""A real Slurm of two nodes, with a tensor parallel pair on each: a node is late, is lost, or has its ranks killed."""

import os
import re
import signal

import pytest

from megatron.bridge.cli.main import main
from tests import namespaces
from tests.functional_tests.launchers.slurm_node import TwoSlurmNodes, missing
from tests.functional_tests.launchers.test_slurm import (
    NEMO_RUN,
    TOY,
    assert_equal,
    launch,
    losses,
    saving,
    sbatch,
)

pytestmark = pytest.mark.slow
STEPS, LATE = 16, 8
RUN = [
    *(
        word
        for word in TOY
        if not word.startswith(("train.train_iters", "checkpoint.save_interval"))
    ),
    *(f"train.train_iters={STEPS}", "checkpoint.save_interval=2", "dist.hang_timeout_minutes=0.1"),
    *("model.tensor_model_parallel_size=2", "model.pipeline_model_parallel_size=2"),
]
SLOW = ["--step-func", "tests.functional_tests.launchers.waiting_step.slow_forward_step"]
NODES = ["--nodes=2"]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    if reason := missing() or namespaces.missing():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("slurm")
    folder.chmod(0o755)
    with namespaces.TwoNamespaces("10.78.0") as joined, TwoSlurmNodes(folder, joined) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def undisturbed(four_workers, tmp_path_factory):
    """The same run by four processes of this machine, without Slurm."""
    folder = tmp_path_factory.mktemp("undisturbed")
    assert four_workers.run(main, ["train", *RUN, *saving(folder)]) == [0] * 4
    return folder


def finish(slurm, job, restarts):
    slurm.wait_for(
        lambda: slurm.state(job) in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"), "end", 600
    )
    assert slurm.state(job) == "COMPLETED"
    assert f"Restarts={restarts}" in slurm.run("scontrol", "show", "job", job)


def reach(slurm, folder, step):
    slurm.wait_for(lambda: max(losses(folder), default=0) >= step, f"step {step}", 600)


def test_a_node_that_is_late(slurm, undisturbed, tmp_path):
    prolog = tmp_path / "late.sh"
    prolog.write_text(f"#!/bin/sh\n[ $SLURM_NODEID = 0 ] || sleep {LATE}\n")
    prolog.chmod(0o755)
    finish(slurm, sbatch(slurm, tmp_path, *RUN, options=NODES, SLURM_TASK_PROLOG=str(prolog)), 0)
    assert_equal(tmp_path, undisturbed, STEPS)
    bound = [f"rank {rank} on node{1 + rank // 2} (CPU {rank % 2})" for rank in range(4)]
    assert f"placement: {', '.join(bound)}" in (tmp_path / "out.txt").read_text()


def test_a_node_that_loses_power_in_a_batch_job(slurm, undisturbed, tmp_path):
    job = sbatch(slurm, tmp_path, *SLOW, *RUN, options=NODES)
    reach(slurm, tmp_path, 5)
    slurm.lose("node2")
    slurm.wait_for(lambda: slurm.state(job) != "RUNNING", "loss", 120)
    slurm.bring_back("node2")
    finish(slurm, job, 1)
    assert_equal(tmp_path, undisturbed, STEPS)


@NEMO_RUN
@pytest.mark.parametrize("launcher", ["torchrun", "default"])
def test_killed_ranks_of_a_node_in_a_job_of_nemo_run(slurm, undisturbed, tmp_path, launcher):
    options = ["--cpu", "--nodes", "2", "--devices", "2", "--time", "00:30:00", "--retries", "1"]
    done = launch(slurm, tmp_path, *options, "--launcher", launcher, *SLOW, *RUN, *saving(tmp_path))
    [job] = re.findall(r"submitted batch job (\d+)", done.stdout)
    reach(slurm, tmp_path, 5)
    for pid in slurm.ranks("node2"):
        os.kill(pid, signal.SIGKILL)
    finish(slurm, job, 1)
    assert_equal(tmp_path, undisturbed, STEPS)
