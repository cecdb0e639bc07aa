# SPDX-License-Identifier: Apache-2.0
"""Outputs to Weights & Biases, MLflow and Prometheus.

A resumed run continues the tracker run whose id is stored in ``logger.log_dir``. Steps that a killed process had
logged after its last checkpoint are logged again under the same step numbers.
"""

import json
import time
from pathlib import Path
from typing import Any

from megatron.bridge.checkpoint import paths
from megatron.bridge.training.callbacks.observe.metrics import PREFIX, Metrics
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.utils.atomic import write_text
from megatron.bridge.utils.config import yaml_text
from megatron.bridge.utils.config.serialize import dump_yaml, to_plain
from megatron.bridge.utils.console import print_rank_0
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


NAMESPACE = "megatron_bridge_"

GAUGES = yaml_text.tables_beside(__file__)
"""Metric -> its name in Prometheus, what it means, and the factor to Prometheus' base unit."""


class PrometheusOutput:
    """A page at ``http://HOST:PORT/metrics`` with the last values, from a thread of the first rank."""

    def __init__(self, config: ConfigContainer) -> None:
        self._host, self._port = config.logger.prometheus_host, config.logger.prometheus_port
        self._save = config.checkpoint.save
        self._gauges: dict[str, Any] = {}
        self._server: Any = None
        self._client: Any = None
        self._registry: Any = None

    def open(self, step: int, train_iters: int) -> None:
        key = f"logger.prometheus_port={self._port}"
        self._client = import_optional("prometheus_client", key, "prometheus")
        self._registry = self._client.CollectorRegistry()
        self._gauge("step", "last step that was logged").set(step)
        self._gauge("train_iters", "step at which the run ends").set(train_iters)
        if self._save is not None:
            folder = Path(self._save)
            text = "step of the newest checkpoint; -1 before the first"
            self._gauge("checkpoint_step", text).set_function(lambda: _newest_checkpoint(folder))
            text = "seconds since 1970 at which the newest checkpoint was published; 0 before the first"
            self._gauge("checkpoint_timestamp_seconds", text).set_function(lambda: _published_at(folder))
        try:
            self._server, _ = self._client.start_http_server(self._port, self._host, registry=self._registry)
        except OSError as error:
            raise UserError(
                f"{key} cannot be opened on logger.prometheus_host={self._host} ({error.strerror or error}): "
                "choose another port or an address of this machine"
            ) from error
        print_rank_0(f"metrics for Prometheus: http://{self._host}:{self._port}/metrics")

    def write(self, step: int, kind: str, numbers: Metrics) -> None:
        self._gauge("step", "").set(step)
        for name, value in numbers.items():
            if name in GAUGES:
                metric, text, factor = GAUGES[name]
                self._gauge(metric, text).set(value * factor)
            elif name.startswith(PREFIX):
                timer = self._gauge("timer_seconds", "parts of a step", "part")
                timer.labels(name.removeprefix(PREFIX)).set(value)
            else:
                self._gauge("loss", "mean loss", "kind", "name").labels(kind, name).set(value)

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def _gauge(self, name: str, text: str, *labels: str) -> Any:
        if name not in self._gauges:
            gauge = self._client.Gauge(f"{NAMESPACE}{name}", text, labels, registry=self._registry)
            self._gauges[name] = gauge
        return self._gauges[name]


def _newest_checkpoint(root: Path) -> float:
    try:
        found = paths.latest_iteration(root)
    except UserError:
        return -1  # the tracker is being replaced, or damaged, which the run reports when it reads it
    return -1 if found is None else found


def _published_at(root: Path) -> float:
    tracker = root / paths.TRACKER
    return tracker.stat().st_mtime if tracker.is_file() else 0.0
