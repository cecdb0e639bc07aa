# SPDX-License-Identifier: Apache-2.0
"""Trackers get the numbers of ``metrics.jsonl``, in one run, also after a resume."""

import json
import math
import sys
import zipfile
from importlib.util import find_spec

import pytest

from megatron.bridge.training.config import CheckpointConfig, LoggerConfig, ValidationConfig
from megatron.bridge.training.config.rules.machine import packages_are_installed
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain
from megatron.bridge.utils.errors import UserError
from tests.toy_run import toy_config
from tests.unit_tests.project.tree import ROOT

BESIDE = ROOT / ".cache/trackers"  # where scripts/extra.sh installs them
if BESIDE.is_dir():
    sys.path.append(str(BESIDE))


def needs(package):
    return pytest.mark.skipif(
        find_spec(package) is None,
        reason=f"{package} is not installed: run scripts/extra.sh trackers",
    )


def train(folder, steps, **logger):
    config = toy_config(
        train={"train_iters": 4, "exit_interval": steps},
        checkpoint=CheckpointConfig(save=str(folder / "run"), save_interval=2),
        logger=LoggerConfig(log_interval=1, log_dir=str(folder / "run"), **logger),
        validation=ValidationConfig(eval_interval=2, eval_iters=1),
    )
    pretrain(config, forward_step)


def expected(folder):
    """(kind/name, step) and value of every number in the file."""
    lines = [
        json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    return {
        (f"{line['kind']}/{name}", line["step"]): value
        for line in lines
        for name, value in line.items()
        if name not in ("kind", "step")
    }


STORES = {
    "database": lambda root: f"sqlite:///{root}/runs.db",
    "folder": lambda root: str(root / "mlruns"),
    "folder as a URI": lambda root: (root / "mlruns").as_uri(),
}


@needs("mlflow")
@pytest.mark.parametrize("store", STORES)
def test_mlflow_has_every_number_of_a_resumed_run(tmp_path, run_in_process, monkeypatch, store):
    import mlflow

    if store == "database" and find_spec("sqlalchemy") is None:
        pytest.skip("sqlalchemy is not installed: run scripts/extra.sh trackers")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "")  # restored afterwards
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE")
    monkeypatch.chdir(tmp_path)
    where = {"mlflow_experiment": "toys", "mlflow_tracking_uri": STORES[store](tmp_path)}
    train(tmp_path, 2, **where)
    train(tmp_path, 4, **where)
    client = mlflow.MlflowClient(where["mlflow_tracking_uri"])
    (run,) = client.search_runs([client.get_experiment_by_name("toys").experiment_id])
    assert run.info.status == "FINISHED"
    found = {}
    for name in run.data.metrics:
        found |= {
            (name, point.step): point.value
            for point in client.get_metric_history(run.info.run_id, name)
        }
    assert found == {key: pytest.approx(value) for key, value in expected(tmp_path).items()}
    assert {step for name, step in found if name == "train/lm loss"} == {1, 2, 3, 4}
    files = {file.path for file in client.list_artifacts(run.info.run_id)}
    assert files == {"run_config.yaml", "environment.json"}


@needs("comet_ml")
def test_comet_has_every_number_of_a_resumed_run(tmp_path, run_in_process, monkeypatch):
    monkeypatch.setenv("COMET_START_ONLINE", "false")
    monkeypatch.setenv("COMET_ERROR_TRACKING_ENABLE", "false")  # which would need a network
    train(tmp_path, 2, comet_project="toys")
    train(tmp_path, 4, comet_project="toys")
    archives = sorted((tmp_path / "run").glob("*.zip"), key=lambda path: path.stat().st_mtime)
    assert len(archives) == 2
    found = {}
    for archive in archives:
        with zipfile.ZipFile(archive) as content:
            lines = content.read("messages.json").decode().splitlines()
        for line in map(json.loads, lines):
            payload = line["payload"]
            if line["type"] == "metric_msg":
                metric = payload["metric"]
                name, step = metric["metricName"], payload["metric"]["step"]
                if name.partition("/")[0] in ("train", "validation", "test"):
                    found[name, step] = float(metric["metricValue"])
    assert found == {key: pytest.approx(value) for key, value in expected(tmp_path).items()}


@needs("swanlab")
def test_swanlab_has_the_numbers_of_a_resumed_run(tmp_path, run_in_process, monkeypatch):
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    train(tmp_path, 2, swanlab_project="toys")
    train(tmp_path, 4, swanlab_project="toys")
    files = [*(tmp_path / "run" / "swanlab").glob("run-*/*.swanlab")]
    assert len(files) == 2
    content = b"".join(file.read_bytes() for file in files)
    names = {name for name, _ in expected(tmp_path)}
    assert {name for name in names if name.encode() in content} == names


def test_tensorboard_has_every_number_of_a_resumed_run(tmp_path, run_in_process):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = str(tmp_path / "events")
    train(tmp_path, 2, tensorboard_dir=folder)
    train(tmp_path, 4, tensorboard_dir=folder)
    events = EventAccumulator(folder)
    events.Reload()
    found = {
        (name, point.step): point.value
        for name in events.Tags()["scalars"]
        for point in events.Scalars(name)
    }
    assert found == {
        key: pytest.approx(value, rel=1e-6) for key, value in expected(tmp_path).items()
    }


@needs("mlflow")
def test_a_database_without_its_packages_is_named(tmp_path, run_in_process, monkeypatch):
    monkeypatch.setattr(
        "megatron.bridge.training.callbacks.observe.trackers.installed", lambda package: False
    )
    (tmp_path / "runs.db").write_text("no database")
    where = {"mlflow_experiment": "toys", "mlflow_tracking_uri": f"sqlite:///{tmp_path}/runs.db"}
    with pytest.raises(UserError) as caught:
        train(tmp_path, 2, **where)
    assert "hf-megatron-bridge[mlflow]" in str(caught.value)


@needs("wandb")
def test_wandb_has_every_number_of_a_resumed_run(tmp_path, run_in_process, monkeypatch):
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    logged, started = [], []
    init = wandb.init

    def watched(**options):
        run = init(**options)
        started.append(options["id"])
        log = run.log
        monkeypatch.setattr(run, "log", lambda numbers: (logged.append(numbers), log(numbers)))
        return run

    monkeypatch.setattr(wandb, "init", watched)
    train(tmp_path, 2, wandb_project="toys")
    first = (tmp_path / "run" / "wandb_run_id").read_text().strip()
    train(tmp_path, 4, wandb_project="toys")
    assert started == [None, first]
    found = {
        (name, line["step"]): value
        for line in logged
        for name, value in line.items()
        if name != "step"
    }
    assert found == expected(tmp_path)
    assert all(math.isfinite(value) for value in found.values())
    assert len(list((tmp_path / "run" / "wandb").glob("offline-run-*"))) == 2


def test_a_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(
        "megatron.bridge.training.config.rules.machine.installed", lambda package: False
    )
    config = toy_config(logger=LoggerConfig(wandb_project="toys"))
    (sentence,) = packages_are_installed(config, 1)
    assert sentence == (
        "logger.wandb_project=toys needs the package wandb, which is not installed: install it with "
        "`uv pip install 'hf-megatron-bridge[wandb]'`, or leave logger.wandb_project unset"
    )
    assert not [*packages_are_installed(toy_config(), 1)]
