# SPDX-License-Identifier: Apache-2.0
"""Two launchers on two nodes, which are network namespaces joined by a cable: a node dies, the cable is pulled."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.bridge.checkpoint import paths
from megatron.bridge.cli.main import main
from tests.namespaces import TwoNamespaces, missing
from tests.unit_tests.cli.mistakes.table import SMALL

STEPS, BOUND = 300, 400.0
RECIPE = [
    "--recipe",
    "llama32_1b_pretrain_config",
    *(word for word in SMALL if "train." not in word),
]
LENGTH = ["tokenizer.vocab_size=96", f"train.train_iters={STEPS}", "train.global_batch_size=4"]
SAVES = ["checkpoint.save_interval=10", "dist.hang_timeout_minutes=0.1"]
PORT = 29511


class Nodes(TwoNamespaces):
    """Two network namespaces, and in each a torchrun of one process."""

    def __init__(self):
        super().__init__()
        self.launchers = {}

    def start(self, number, folder):
        launcher = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nnodes=2",
            "--nproc-per-node=1",
        ]
        meeting = [
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={self.addresses[0]}:{PORT}",
            f"--rdzv-id={folder.name}",
        ]
        meeting += [
            f"--rdzv-conf=is_host={int(number == 0)},join_timeout=100",
            f"--local-addr={self.addresses[number]}",
        ]
        program = ["--max-restarts=20", "scripts/training/run_recipe.py", *RECIPE, *LENGTH, *SAVES]
        places = [f"checkpoint.save={folder}", f"checkpoint.load={folder}"]
        environment = os.environ | {
            "GLOO_SOCKET_IFNAME": self.cables[number],
            "OMP_NUM_THREADS": "1",
        }
        with (folder.parent / f"{folder.name}.{number}.log").open("a") as log:
            self.launchers[number] = subprocess.Popen(
                [*self.inside(number), *launcher, *meeting, *program, *places],
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )

    def kill(self, number):
        """End a node at once: its launcher and its rank, which has a session of its own."""
        self.launchers.pop(number).kill()
        self.kill_all(number)

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
        self.run_until(
            folder, lambda: all(launcher.poll() == 0 for launcher in self.launchers.values())
        )

    def reach(self, folder, step):
        self.run_until(folder, lambda: last_step(folder) >= step)


def last_step(folder: Path):
    return (paths.latest_iteration(folder) or 0) if folder.is_dir() else 0


@pytest.mark.slow
@pytest.mark.skipif(missing() is not None, reason=str(missing()))
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
