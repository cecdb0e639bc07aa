# SPDX-License-Identifier: Apache-2.0
"""Shards of a corpus on a real Ray and a real Slurm of this machine, whose nodes, head and jobs are killed."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from megatron.bridge.data.pretraining.preprocess import PreprocessConfig, preprocess
from megatron.bridge.data.pretraining.shards import finished_manifest, preprocess_shards
from megatron.bridge.utils.processes import free_port
from tests.functional_tests.launchers.test_slurm import slurm  # noqa: F401 - a fixture
from tests.refusals import refused
from tests.unit_tests.data.conftest import TEXT, tokenizer_dir  # noqa: F401 - a fixture

BESIDE = Path(__file__).parents[3] / ".cache/shards"
SHARDS, DOCUMENTS = 24, 4000
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not BESIDE.is_dir(),
        reason="datatrove and Ray are not installed: run scripts/extra.sh shards",
    ),
]


@pytest.fixture
def environment(monkeypatch):
    """What processes need to find datatrove and Ray, and to stay on the loopback address."""
    found = {
        "PYTHONPATH": f"{BESIDE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{BESIDE}/bin{os.pathsep}{os.environ['PATH']}",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_gcs_rpc_server_reconnect_timeout_s": "5",
    }
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path, str(BESIDE)])


@pytest.fixture
def corpus(tmp_path, tokenizer_dir):  # noqa: F811
    """The config of shards, how many bytes are in each, and the bytes that one process writes."""
    path = tmp_path / "corpus.jsonl"
    path.write_text(
        "".join(json.dumps({"text": f"{at}: {TEXT[at % 4] * 9}"}) + "\n" for at in range(DOCUMENTS))
    )
    rest = {
        "inputs": [path],
        "tokenizer_model": str(tokenizer_dir),
        "append_eod": True,
        "workers": 2,
    }
    preprocess(PreprocessConfig(output_prefix=tmp_path / "one", **rest))
    expected = [(tmp_path / f"one{ending}").read_bytes() for ending in (".bin", ".idx")]
    return (
        PreprocessConfig(output_prefix=tmp_path / "many", **rest),
        path.stat().st_size // SHARDS + 1,
        expected,
    )


def joined(config):
    files = sorted(Path(f"{config.output_prefix}.shards").glob("0*.bin"))
    return [
        b"".join(path.read_bytes() for path in files),
        Path(f"{config.output_prefix}.idx").read_bytes(),
    ]


class Head:
    """The head of a Ray on the loopback address."""

    def __init__(self, folder):
        self.address = f"127.0.0.1:{free_port()}"
        words = [
            "--head",
            "--block",
            "--node-ip-address=127.0.0.1",
            "--include-dashboard=false",
            "--num-cpus=2",
        ]
        words += [f"--port={self.address.partition(':')[2]}", "--object-store-memory=80000000"]
        self.log = folder / "head.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                ["ray", "start", *words], stdout=log, stderr=log, start_new_session=True
            )
        wait_for(
            lambda: "Ray runtime started" in self.log.read_text() or self.process.poll() is not None
        )
        if self.process.poll() is not None:
            self.kill()
            raise AssertionError(self.log.read_text())

    def kill(self):
        """All of its processes: the session is theirs alone."""
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = path.read_text().rpartition(")")[2].split()
                if int(fields[3]) == self.process.pid:
                    os.kill(int(path.parent.name), signal.SIGKILL)
            except (OSError, ProcessLookupError):
                continue
        self.process.wait()


def started(folder):
    """A head; on a busy machine Ray gives up waiting for its own processes."""
    for _ in range(3):
        with suppress(AssertionError):
            return Head(folder)
    pytest.skip("Ray does not start on this machine")


def wait_for(condition):
    end = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.2)


@pytest.fixture
def head(tmp_path, environment, monkeypatch):
    found = started(tmp_path)
    monkeypatch.setenv("RAY_ADDRESS", found.address)
    yield found
    found.kill()


def test_ray_makes_the_bytes_of_one_process(corpus, head):
    config, size, expected = corpus
    made = preprocess_shards(config, "ray", size, {})
    assert len(made["shards"]) == SHARDS
    assert joined(config) == expected


def in_a_process(config, executor, size, sbatch):
    """The same call in a process that can be killed."""
    values = {
        **vars(config),
        "inputs": [str(path) for path in config.inputs],
        "output_prefix": str(config.output_prefix),
    }
    code = (
        "import json, sys; from pathlib import Path\n"
        "from megatron.bridge.data.pretraining.preprocess import PreprocessConfig\n"
        "from megatron.bridge.data.pretraining.shards import preprocess_shards\n"
        "values, *rest = json.loads(sys.argv[1])\n"
        "values['output_prefix'] = Path(values['output_prefix'])\n"
        "preprocess_shards(PreprocessConfig(**values), *rest)"
    )
    words = [sys.executable, "-c", code, json.dumps([values, executor, size, sbatch])]
    return subprocess.Popen(words, stderr=subprocess.PIPE, text=True)


def test_a_ray_head_that_dies_is_one_sentence_and_another_one_continues(
    corpus, head, tmp_path, monkeypatch
):
    config, size, expected = corpus
    running = in_a_process(config, "ray", size, {})
    folder = Path(f"{config.output_prefix}.shards")
    wait_for(lambda: len(list(folder.glob("0*.source.json"))) >= 2)
    head.kill()
    said = running.communicate()[1].strip().splitlines()[-1]
    assert all(
        part in said
        for part in (f"--executor ray on {head.address}", "ray.log", "repeat the command")
    ), said
    left = int(re.search(rf"(\d+) of {SHARDS} shards", said)[1])
    assert 0 < left < SHARDS
    assert finished_manifest(config.output_prefix) is None
    with refused("--executor ray", head.address, "repeat the command"):
        preprocess_shards(config, "ray", size, {})
    second = started(tmp_path)
    monkeypatch.setenv("RAY_ADDRESS", second.address)
    try:
        preprocess_shards(config, "ray", size, {})
    finally:
        second.kill()
    assert joined(config) == expected


SBATCH = {"partition": "toy", "time": "00:30:00", "mem-per-cpu": "400M"}


@pytest.fixture
def cluster(slurm, environment, monkeypatch):  # noqa: F811
    path = os.environ["PATH"]
    for name, value in slurm.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", f"{path}:/usr/sbin:/sbin")
    return slurm


def test_slurm_makes_the_bytes_of_one_process_though_jobs_are_killed(corpus, cluster):
    config, size, expected = corpus
    running = in_a_process(config, "slurm", size, SBATCH)
    folder = Path(f"{config.output_prefix}.shards")
    wait_for(lambda: len(list(folder.glob("0*.source.json"))) >= 2)
    jobs = cluster.run("squeue", "-h", "-t", "RUNNING", "-o", "%i").split()
    cluster.run("scancel", *jobs)
    assert running.wait() == 0, running.stderr.read()
    assert len(finished_manifest(config.output_prefix)["shards"]) == SHARDS
    assert joined(config) == expected
    assert cluster.run("squeue", "-h").strip() == ""


@pytest.mark.parametrize(
    ("change", "part"),
    [({"partition": "tyo"}, "Invalid partition"), ({"time": "9-00"}, "time limit")],
)
def test_what_slurm_refuses_is_named(corpus, cluster, change, part):
    config, size, _ = corpus
    with refused("--executor slurm", part, "repeat the command"):
        preprocess_shards(config, "slurm", size, SBATCH | change)


def test_a_wrong_line_is_named_with_its_node(corpus, cluster):
    config, size, _ = corpus
    with config.inputs[0].open("a") as file:
        file.write('{"text": 3}\n')
    with refused("corpus.jsonl from ", "int", f"node {os.uname().nodename}"):
        preprocess_shards(config, "slurm", size, SBATCH)
