# SPDX-License-Identifier: Apache-2.0
"""Two launchers on two nodes, which are network namespaces joined by a cable: a node dies, the cable is pulled."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.bridge.checkpoint import paths
from megatron.bridge.cli.main import main
from tests.unit_tests.cli.mistakes.table import SMALL

STEPS, BOUND = 300, 400.0
RECIPE = ["--recipe", "llama32_1b_pretrain_config", *(word for word in SMALL if "train." not in word)]
LENGTH = ["tokenizer.vocab_size=96", f"train.train_iters={STEPS}", "train.global_batch_size=4"]
SAVES = ["checkpoint.save_interval=10", "dist.hang_timeout_minutes=0.1"]
PORT = 29511


def ip(*words):
    subprocess.run(["ip", *words], check=True)


class Nodes:
    """Two network namespaces, and in each a torchrun of one process."""

    def __init__(self):
        self.names = [f"node{os.getpid()}_{number}" for number in (1, 2)]
        self.cables = [f"mb{os.getpid()}{side}" for side in "ab"]
        self.launchers = {}

    def __enter__(self):
        for name in self.names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ends = [["name", cable, "netns", name] for cable, name in zip(self.cables, self.names, strict=True)]
        ip("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for number, (name, cable) in enumerate(zip(self.names, self.cables, strict=True)):
            ip("-n", name, "addr", "add", f"10.77.0.{number + 1}/24", "dev", cable)
            ip("-n", name, "link", "set", cable, "up")
        return self

    def __exit__(self, *_):
        for number in list(self.launchers):
            self.kill(number)
        for name in self.names:
            ip("netns", "del", name)

    def start(self, number, folder):
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
        meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint=10.77.0.1:{PORT}", f"--rdzv-id={folder.name}"]
        meeting += [
            f"--rdzv-conf=is_host={int(number == 0)},join_timeout=100",
            f"--local-addr=10.77.0.{number + 1}",
        ]
        program = ["--max-restarts=20", "scripts/training/run_recipe.py", *RECIPE, *LENGTH, *SAVES]
        places = [f"checkpoint.save={folder}", f"checkpoint.load={folder}"]
        environment = os.environ | {"GLOO_SOCKET_IFNAME": self.cables[number], "OMP_NUM_THREADS": "1"}
        with (folder.parent / f"{folder.name}.{number}.log").open("a") as log:
            self.launchers[number] = subprocess.Popen(
                ["ip", "netns", "exec", self.names[number], *launcher, *meeting, *program, *places],
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )

    def kill(self, number):
        """End a node at once: its launcher and its rank, which has a session of its own."""
        self.launchers.pop(number).kill()
        inside = subprocess.run(["ip", "netns", "pids", self.names[number]], capture_output=True, text=True, check=True)
        for pid in inside.stdout.split():
            os.kill(int(pid), signal.SIGKILL)

    def plug(self, number, state):
        ip("-n", self.names[number], "link", "set", self.cables[number], state)

    def run_until(self, folder, done):
        """Start each launcher that fails again, as a scheduler does, until ``done()``."""
        end = time.monotonic() + BOUND
        while not done():
            assert time.monotonic() < end, "the run hangs"
            for number, launcher in list(self.launchers.items()):
                if launcher.poll() not in (None, 0):
                    self.kill(number)
                    self.start(number, folder)
            time.sleep(0.05)

    def finish(self, folder):
        self.run_until(folder, lambda: all(launcher.poll() == 0 for launcher in self.launchers.values()))

    def reach(self, folder, step):
        self.run_until(folder, lambda: last_step(folder) >= step)


def last_step(folder: Path):
    return (paths.latest_iteration(folder) or 0) if folder.is_dir() else 0


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="network namespaces need root and ip")
def test_a_lost_node_and_a_pulled_cable(tmp_path):
    with Nodes() as nodes:
        for number in (0, 1):
            nodes.start(number, tmp_path / "whole")
        nodes.finish(tmp_path / "whole")
    broken = tmp_path / "broken"
    with Nodes() as nodes:
        for number in (0, 1):
            nodes.start(number, broken)
        nodes.reach(broken, 50)
        nodes.kill(1)
        nodes.start(1, broken)
        nodes.reach(broken, last_step(broken) + 50)
        nodes.plug(1, "down")
        time.sleep(15)  # longer than the hang timeout
        nodes.plug(1, "up")
        nodes.finish(broken)
    for number in (0, 1):  # torchrun's own have no rank before them
        assert "]: Traceback" not in (tmp_path / f"broken.{number}.log").read_text()
    ends = [str(paths.iteration_dir(tmp_path / name, STEPS)) for name in ("whole", "broken")]
    assert main(["checkpoint", "diff", *ends, "--values"]) == 0
