# SPDX-License-Identifier: Apache-2.0
"""Trackers get the numbers of ``metrics.jsonl``, in one run, also after a resume."""

import json
import math
import sys
from importlib.util import find_spec

import pytest

from megatron.bridge.training.config import CheckpointConfig, LoggerConfig, ValidationConfig
from megatron.bridge.training.config.rules.machine import packages_are_installed
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain
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


@needs("mlflow")
def test_mlflow_has_every_number_of_a_resumed_run(tmp_path, run_in_process, monkeypatch):
    import mlflow

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    where = {"mlflow_experiment": "toys", "mlflow_tracking_uri": (tmp_path / "mlruns").as_uri()}
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
