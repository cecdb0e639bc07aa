# SPDX-License-Identifier: Apache-2.0
"""A real Ray of two nodes, which are network namespaces: a rank is killed, and the run goes on bitwise."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.bridge.utils.processes import free_port
from tests import namespaces
from tests.functional_tests.launchers.test_shards import BESIDE, environment, wait_for  # noqa: F401 - a fixture
from tests.functional_tests.launchers.test_slurm import (
    ROOT,
    TOY,
    assert_equal,
    losses,
    saving,
    undisturbed,  # noqa: F401 - a fixture
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not BESIDE.is_dir(), reason="Ray is not installed: run scripts/extra.sh shards"
    ),
]
SLOW = ["--step-func", "tests.functional_tests.launchers.waiting_step.slow_forward_step"]
SLOW += [word.replace("save_interval=100", "save_interval=2") for word in TOY]


@pytest.fixture
def cluster(environment, tmp_path, monkeypatch):  # noqa: F811
    """The namespaces of a head and another node, which have two CPUs each."""
    if reason := namespaces.missing():
        pytest.skip(reason)
    with namespaces.TwoNamespaces("10.79.0") as joined:
        address = f"{joined.addresses[0]}:{free_port()}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        monkeypatch.delenv(
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
        )  # these nodes are not on the loopback address
        head = ["--head", f"--port={address.partition(':')[2]}", "--include-dashboard=false"]
        for number, words in enumerate((head, [f"--address={address}"])):
            log = tmp_path / f"node{number}.log"
            own = [
                f"--node-ip-address={joined.addresses[number]}",
                "--num-cpus=2",
                "--object-store-memory=80000000",
            ]
            command = [*joined.inside(number), "ray", "start", "--block", *words, *own]
            # the host name is that of this machine, so Gloo would find the loopback address
            env = os.environ | {"GLOO_SOCKET_IFNAME": joined.cables[number]}
            with log.open("wb") as file:
                node = subprocess.Popen(
                    command, stdout=file, stderr=file, env=env, start_new_session=True
                )
            wait_for(
                lambda node=node, log=log: (
                    "Ray runtime started" in log.read_text() or node.poll() is not None
                )
            )
            assert node.poll() is None, log.read_text()
        yield joined


def test_a_run_whose_rank_is_killed_goes_on_bitwise(cluster, undisturbed, tmp_path):  # noqa: F811
    where = ["--on", "ray", "--cpu", "--nodes", "2", "--devices", "1"]
    start = [*cluster.inside(0), sys.executable, "-m", "megatron.bridge.cli.main", "launch"]
    log = tmp_path / "out.txt"

    def launched():
        with log.open("ab") as file:
            return subprocess.Popen(
                [*start, *where, *SLOW, *saving(tmp_path)], cwd=ROOT, stdout=file, stderr=file
            )

    process = launched()
    wait_for(lambda: max(losses(tmp_path), default=0) >= 3 or process.poll() is not None)
    for pid in filter(is_rank, cluster.processes(1)):
        os.kill(pid, signal.SIGKILL)
    assert process.wait(300) == 1, log.read_text()
    assert "error: --on ray: " in log.read_text()
    assert launched().wait(300) == 0, log.read_text()
    assert_equal(tmp_path, undisturbed)


def is_rank(pid):
    try:
        return b"\0LOCAL_RANK=" in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # it ended meanwhile
        return False
