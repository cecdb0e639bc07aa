# SPDX-License-Identifier: Apache-2.0
"""Outputs to Weights & Biases and MLflow.

A resumed run continues the tracker run whose id is stored in ``logger.log_dir``. Steps that a killed process had
logged after its last checkpoint are logged again under the same step numbers.
"""

import json
import time
from pathlib import Path
from typing import Any

from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.utils.atomic import write_text
from megatron.bridge.utils.config.serialize import dump_yaml, to_plain
from megatron.bridge.utils.environment import environment
from megatron.bridge.utils.errors import UserError, one_line
from megatron.bridge.utils.optional_imports import import_optional

WANDB_ID, MLFLOW_ID = "wandb_run_id", "mlflow_run_id"


class WandbOutput:
    """A run of Weights & Biases, configured further by the environment variables of ``wandb``."""

    def __init__(self, config: ConfigContainer) -> None:
        self._config = config
        self._run: Any = None

    def open(self, step: int, train_iters: int) -> None:
        logger = self._config.logger
        wandb = import_optional("wandb", f"logger.wandb_project={logger.wandb_project}", "wandb")
        known = _saved_id(self._config, WANDB_ID, step)
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
        _save_id(self._config, WANDB_ID, self._run.id)

    def write(self, step: int, kind: str, numbers: dict[str, float | int]) -> None:
        self._run.log({f"{kind}/{name}": value for name, value in numbers.items()} | {"step": step})

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


class MLflowOutput:
    """A run of MLflow."""

    def __init__(self, config: ConfigContainer) -> None:
        self._config = config
        self._mlflow: Any = None
        self._client: Any = None
        self._id = ""

    def open(self, step: int, train_iters: int) -> None:
        logger = self._config.logger
        mlflow: Any = import_optional("mlflow", f"logger.mlflow_experiment={logger.mlflow_experiment}", "mlflow")
        try:
            self._client = mlflow.MlflowClient(logger.mlflow_tracking_uri)
            known = _saved_id(self._config, MLFLOW_ID, step)
            self._id = self._new_run() if known is None else known
            self._client.update_run(self._id, status="RUNNING")
            self._client.log_text(self._id, dump_yaml(self._config), "run_config.yaml")
            self._client.log_text(self._id, json.dumps(environment(), indent=2), "environment.json")
        except (mlflow.MlflowException, OSError) as error:
            self._client = None
            key = f"logger.mlflow_experiment={logger.mlflow_experiment}"
            raise _cannot_open(key, error, "check logger.mlflow_tracking_uri") from error
        self._mlflow = mlflow
        _save_id(self._config, MLFLOW_ID, self._id)

    def _new_run(self) -> str:
        logger = self._config.logger
        found = self._client.get_experiment_by_name(logger.mlflow_experiment)
        experiment = found.experiment_id if found else self._client.create_experiment(logger.mlflow_experiment)
        return self._client.create_run(experiment, run_name=logger.mlflow_run_name).info.run_id

    def write(self, step: int, kind: str, numbers: dict[str, float | int]) -> None:
        now = time.time_ns() // 1_000_000
        metric = self._mlflow.entities.Metric
        metrics = [metric(f"{kind}/{name}", float(value), now, step) for name, value in numbers.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self) -> None:
        if self._client is not None:
            self._client.set_terminated(self._id)


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
