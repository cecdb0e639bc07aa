# SPDX-License-Identifier: Apache-2.0
"""Weights & Biases and MLflow, which get the same numbers as every other output.

Their runs are found again: a resumed run goes on in the one whose id lies in ``logger.log_dir``. Steps that were
lost with a killed process are written again, under their own numbers.
"""

import json
import time
from pathlib import Path
from typing import Any

from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.utils.atomic import write_text
from megatron.bridge.utils.config.serialize import dump_yaml, to_plain
from megatron.bridge.utils.environment import environment
from megatron.bridge.utils.errors import UserError
from megatron.bridge.utils.optional import optional

WANDB_ID, MLFLOW_ID = "wandb_run_id", "mlflow_run_id"


class WandbOutput:
    """A run of Weights & Biases; how it is reached is said by its own environment variables."""

    def __init__(self, config: ConfigContainer) -> None:
        self._config = config
        self._run: Any = None

    def open(self, step: int, train_iters: int) -> None:
        """Start a run, or go on with that of the folder."""
        logger = self._config.logger
        wandb = optional("wandb", f"logger.wandb_project={logger.wandb_project}", "wandb")
        known = _known_id(self._config, WANDB_ID, step)
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
            reason = " ".join(str(error).split())[:200]
            raise UserError(
                f"logger.wandb_project={logger.wandb_project} cannot be opened ({reason}): log in, or set "
                f"WANDB_MODE to offline"
            ) from error
        # its own counter refuses steps that are done again
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        _keep_id(self._config, WANDB_ID, self._run.id)

    def write(self, step: int, kind: str, numbers: dict[str, float | int]) -> None:
        """All numbers at once."""
        self._run.log({f"{kind}/{name}": value for name, value in numbers.items()} | {"step": step})

    def close(self) -> None:
        """Send what is left."""
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
        """Start a run, or go on with that of the folder."""
        logger = self._config.logger
        mlflow: Any = optional("mlflow", f"logger.mlflow_experiment={logger.mlflow_experiment}", "mlflow")
        try:
            self._client = mlflow.MlflowClient(logger.mlflow_tracking_uri)
            known = _known_id(self._config, MLFLOW_ID, step)
            self._id = self._new_run() if known is None else known
            self._client.update_run(self._id, status="RUNNING")
            self._client.log_text(self._id, dump_yaml(self._config), "run_config.yaml")
            self._client.log_text(self._id, json.dumps(environment(), indent=2), "environment.json")
        except (mlflow.MlflowException, OSError) as error:
            self._client = None
            reason = " ".join(str(error).split())[:200]
            raise UserError(
                f"logger.mlflow_experiment={logger.mlflow_experiment} cannot be opened ({reason}): check "
                f"logger.mlflow_tracking_uri"
            ) from error
        self._mlflow = mlflow
        _keep_id(self._config, MLFLOW_ID, self._id)

    def _new_run(self) -> str:
        logger = self._config.logger
        found = self._client.get_experiment_by_name(logger.mlflow_experiment)
        experiment = found.experiment_id if found else self._client.create_experiment(logger.mlflow_experiment)
        return self._client.create_run(experiment, run_name=logger.mlflow_run_name).info.run_id

    def write(self, step: int, kind: str, numbers: dict[str, float | int]) -> None:
        """All numbers at once."""
        now = time.time_ns() // 1_000_000
        metric = self._mlflow.entities.Metric
        metrics = [metric(f"{kind}/{name}", float(value), now, step) for name, value in numbers.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self) -> None:
        """End the run."""
        if self._client is not None:
            self._client.set_terminated(self._id)


def _known_id(config: ConfigContainer, name: str, step: int) -> str | None:
    """The run that a resumed run goes on with."""
    path = Path(config.logger.log_dir or "") / name
    return path.read_text().strip() if config.logger.log_dir and step and path.is_file() else None


def _keep_id(config: ConfigContainer, name: str, value: str) -> None:
    if config.logger.log_dir:
        Path(config.logger.log_dir).mkdir(parents=True, exist_ok=True)
        write_text(Path(config.logger.log_dir) / name, value + "\n")
