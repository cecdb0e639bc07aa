# SPDX-License-Identifier: Apache-2.0
"""Trackers that get the metrics of a run: Weights & Biases, MLflow, Comet and SwanLab.

A resumed run continues the tracker run whose id is stored in ``logger.log_dir``. Steps that a killed process had
logged after its last checkpoint are logged again under the same step numbers.
"""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.utils.atomic import write_text
from megatron.bridge.utils.config.serialize import dump_yaml, to_plain
from megatron.bridge.utils.environment import environment
from megatron.bridge.utils.errors import UserError, one_line
from megatron.bridge.utils.optional_imports import import_optional, installed


class WandbOutput:
    """A run of Weights & Biases, configured further by the environment variables of ``wandb``."""

    def __init__(self, config: ConfigContainer) -> None:
        self._config = config
        self._run: Any = None

    def open(self, step: int, train_iters: int) -> None:
        logger = self._config.logger
        wandb = import_optional("wandb", f"logger.wandb_project={logger.wandb_project}", "wandb")
        known = _saved_id(self._config, "wandb_run_id", step)
        try:
            self._run = wandb.init(
                project=logger.wandb_project,
                entity=logger.wandb_entity,
                name=logger.wandb_exp_name,
                dir=logger.wandb_save_dir or logger.log_dir,
                id=known,
                resume=None if known is None else "allow",
                config=to_plain(self._config) | {"environment": environment()},
            )
        except (wandb.Error, OSError) as error:
            key = f"logger.wandb_project={logger.wandb_project}"
            raise _cannot_open(key, error, "log in, or set WANDB_MODE=offline") from error
        # the default step counter of wandb refuses steps that are logged again
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        _save_id(self._config, "wandb_run_id", self._run.id)

    def write(self, step: int, kind: str, numbers: dict[str, float | int]) -> None:
        self._run.log({f"{kind}/{name}": value for name, value in numbers.items()} | {"step": step})

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


class MLflowOutput:
    """A run of MLflow: on a server, in a database (``sqlite:///runs.db``) or in a folder."""

    def __init__(self, config: ConfigContainer) -> None:
        self._config = config
        self._mlflow: Any = None
        self._client: Any = None
        self._id = ""

    def open(self, step: int, train_iters: int) -> None:
        logger = self._config.logger
        mlflow: Any = import_optional(
            "mlflow", f"logger.mlflow_experiment={logger.mlflow_experiment}", "mlflow"
        )
        _allow_folder(logger.mlflow_tracking_uri)
        try:
            self._client = mlflow.MlflowClient(logger.mlflow_tracking_uri)
            known = _saved_id(self._config, "mlflow_run_id", step)
            self._id = self._new_run() if known is None else known
            self._client.update_run(self._id, status="RUNNING")
            self._client.log_text(self._id, dump_yaml(self._config), "run_config.yaml")
            self._client.log_text(self._id, json.dumps(environment(), indent=2), "environment.json")
        except Exception as error:  # each kind of store has its own errors
            self._client = None
            key = f"logger.mlflow_experiment={logger.mlflow_experiment}"
            raise _cannot_open(key, error, _way_out(logger.mlflow_tracking_uri)) from error
        self._mlflow = mlflow
        _save_id(self._config, "mlflow_run_id", self._id)

    def _new_run(self) -> str:
        logger = self._config.logger
        existing = self._client.get_experiment_by_name(logger.mlflow_experiment)
        experiment = (
            existing.experiment_id
            if existing
            else self._client.create_experiment(
                logger.mlflow_experiment, artifact_location=_artifacts(logger.mlflow_tracking_uri)
            )
        )
        return self._client.create_run(experiment, run_name=logger.mlflow_run_name).info.run_id

    def write(self, step: int, kind: str, numbers: dict[str, float | int]) -> None:
        now = time.time_ns() // 1_000_000
        metric = self._mlflow.entities.Metric
        metrics = [
            metric(f"{kind}/{name}", float(value), now, step) for name, value in numbers.items()
        ]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self) -> None:
        if self._client is not None:
            self._client.set_terminated(self._id)


def _allow_folder(uri: str | None) -> None:
    """Let MLflow write to a folder that the config names; since 3.10 it wants to be asked in the environment."""
    if uri is not None and (uri.startswith("file:") or "://" not in uri):
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")


def _artifacts(uri: str | None) -> str | None:
    """Return the folder of the files of runs: next to a database, which would otherwise use the current folder."""
    if uri is None or not uri.startswith(_SQLITE):
        return None
    return (Path(uri.removeprefix(_SQLITE)).absolute().parent / "mlruns").as_uri()


def _way_out(uri: str | None) -> str:
    is_database = uri is None or uri.startswith("sqlite:")
    if is_database and not installed("sqlalchemy"):
        return "a database needs sqlalchemy and alembic, which `uv pip install 'hf-megatron-bridge[mlflow]'` installs"
    return "check logger.mlflow_tracking_uri"


_SQLITE = "sqlite:///"


class CometOutput:
    """An experiment of Comet, configured further by the environment variables of ``comet_ml``."""

    def __init__(self, config: ConfigContainer) -> None:
        self._config = config
        self._experiment: Any = None

    def open(self, step: int, train_iters: int) -> None:
        logger = self._config.logger
        key = f"logger.comet_project={logger.comet_project}"
        comet = import_optional("comet_ml", key, "comet")
        known = _saved_id(self._config, "comet_experiment_key", step)
        nothing_by_itself = {
            f"auto_{name}_logging": False for name in ("metric", "param", "output")
        }
        settings = comet.ExperimentConfig(
            name=logger.comet_experiment_name,
            offline_directory=logger.log_dir,
            log_code=False,
            log_graph=False,
            log_git_patch=False,
            parse_args=False,
            display_summary_level=0,
            **nothing_by_itself,
        )
        try:
            self._experiment = comet.start(
                project=logger.comet_project,
                workspace=logger.comet_workspace,
                experiment_key=known,
                mode="create" if known is None else "get",
                experiment_config=settings,
            )
        except (ValueError, OSError, comet.exceptions.CometException) as error:
            raise _cannot_open(
                key, error, "set COMET_API_KEY, or COMET_START_ONLINE=false to log into a file"
            ) from error
        described = to_plain(self._config) | {"environment": environment()}
        self._experiment.log_parameters(described)
        _save_id(self._config, "comet_experiment_key", self._experiment.get_key())

    def write(self, step: int, kind: str, numbers: dict[str, float | int]) -> None:
        for name, value in numbers.items():
            self._experiment.log_metric(f"{kind}/{name}", value, step=step)

    def close(self) -> None:
        if self._experiment is not None:
            self._experiment.end()


class SwanLabOutput:
    """A run of SwanLab, configured further by the environment variables of ``swanlab``."""

    def __init__(self, config: ConfigContainer) -> None:
        self._config = config
        self._run: Any = None

    def open(self, step: int, train_iters: int) -> None:
        logger = self._config.logger
        key = f"logger.swanlab_project={logger.swanlab_project}"
        swanlab = import_optional("swanlab", key, "swanlab")
        known = _saved_id(self._config, "swanlab_run_id", step)
        try:
            self._run = swanlab.init(
                project=logger.swanlab_project,
                workspace=logger.swanlab_workspace,
                name=logger.swanlab_exp_name,
                log_dir=None if logger.log_dir is None else str(Path(logger.log_dir, "swanlab")),
                id=known,
                resume=None if known is None else "allow",
                config=to_plain(self._config) | {"environment": environment()},
            )
        except (RuntimeError, ValueError, OSError) as error:
            raise _cannot_open(
                key, error, "log in, or set SWANLAB_MODE=offline to log into a folder"
            ) from error
        _save_id(self._config, "swanlab_run_id", self._run.id)

    def write(self, step: int, kind: str, numbers: dict[str, float | int]) -> None:
        self._run.log({f"{kind}/{name}": value for name, value in numbers.items()}, step=step)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


_TRACKERS: dict[str, Callable[[ConfigContainer], Any]] = {
    "wandb_project": WandbOutput,
    "mlflow_experiment": MLflowOutput,
    "comet_project": CometOutput,
    "swanlab_project": SwanLabOutput,
}
"""Field of ``logger`` that turns a tracker on -> the tracker."""


def trackers(config: ConfigContainer) -> list[Any]:
    """Return the trackers that the config turns on."""
    return [tracker(config) for name, tracker in _TRACKERS.items() if getattr(config.logger, name)]


def _cannot_open(key: str, error: Exception, way_out: str) -> UserError:
    return UserError(f"{key} cannot be opened ({one_line(error)}): {way_out}")


def _saved_id(config: ConfigContainer, name: str, step: int) -> str | None:
    """The id of the tracker run to continue; None for a new one."""
    path = Path(config.logger.log_dir or "") / name
    return path.read_text().strip() if config.logger.log_dir and step and path.is_file() else None


def _save_id(config: ConfigContainer, name: str, value: str) -> None:
    if config.logger.log_dir:
        Path(config.logger.log_dir).mkdir(parents=True, exist_ok=True)
        write_text(Path(config.logger.log_dir) / name, value + "\n")
