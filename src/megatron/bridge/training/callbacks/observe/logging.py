# SPDX-License-Identifier: Apache-2.0
"""Logging of a run: metrics are computed once and written to all outputs."""

import logging
import time
from typing import Any

import torch

from megatron.bridge.checkpoint.collective import on_first_rank
from megatron.bridge.training.callbacks.base import Callback
from megatron.bridge.training.callbacks.observe import metrics
from megatron.bridge.training.callbacks.observe.metrics import Metrics
from megatron.bridge.training.callbacks.observe.outputs import MetricsOutput, outputs
from megatron.bridge.training.config import ConfigContainer, TrainingConfig
from megatron.bridge.training.initialize.rank_state import sizes_of
from megatron.bridge.training.state import Run
from megatron.bridge.training.step.losses import LossReport
from megatron.bridge.utils import distributed, placement
from megatron.bridge.utils.console import print_rank_0


class Logging(Callback):
    """Logs mean losses, learning rate, norms, throughput and memory every ``logger.log_interval`` steps.

    Losses are summed on the device and read once per interval, so other steps need no synchronization. All ranks
    compute the metrics; the first rank writes them to all outputs.
    """

    def __init__(self, config: ConfigContainer, telemetry: MetricsOutput | None = None) -> None:
        self._config = config
        self._telemetry = telemetry
        self._outputs: list[MetricsOutput] = []
        self._totals: LossReport = {}
        self._steps = self._samples = 0
        self._seconds = 0.0
        self._started = 0.0
        self._speed: metrics.Throughput | None = None
        self._energy: metrics.EnergyUse | None = None
        self._timers = metrics.StepTimers(config.logger)
        self._wait = metrics.DataWait()

    def state_dict(self) -> dict[str, Any]:
        """The sums since the last log line: a resumed run logs the same values as an uninterrupted one."""
        if not self._steps:
            return {}
        totals = {name: total.item() for name, total in self._totals.items()}
        return {"totals": totals, "counts": (self._steps, self._samples, self._seconds)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._totals = {
            name: torch.tensor(total, dtype=torch.float64)
            for name, total in state["totals"].items()
        }
        self._steps, self._samples, self._seconds = state["counts"]

    def on_train_start(self, context: Run) -> None:
        self._speed = metrics.Throughput(self._config, context)
        self._energy = metrics.EnergyUse(self._config.logger.log_energy)
        self._timers.attach(context)
        on_first_rank(lambda: self._open(context.progress.step))
        print_rank_0(announcement(self._config, context.progress.step))
        placement.announce(
            debug=(self._config.logger.logging_level or logging.WARNING) <= logging.DEBUG
        )

    def _open(self, step: int) -> None:
        self._outputs = outputs(self._config)
        if self._telemetry is not None:
            self._outputs.append(self._telemetry)
        for output in self._outputs:
            output.open(step, self._config.train.train_iters)

    def on_train_step_start(self, context: Run) -> None:
        self._wait.attach(context)
        self._started = time.perf_counter()  # only steps are timed, not what happens between them

    def on_grads_ready(self, context: Run) -> None:
        self._timers.start_optimizer()

    def on_train_step_end(self, context: Run) -> None:
        """Add the step to the sums; log at the interval and after the last step."""
        step = context.last_step
        assert step is not None, "a step ended"
        self._timers.stop_optimizer()
        for name, loss in step.loss_dict.items():
            self._totals[name] = (
                self._totals[name].to(loss.device) + loss if name in self._totals else loss
            )
        self._steps += 1
        self._samples += step.samples
        last = context.progress.step == self._config.train.train_iters
        due = last or context.is_due(self._config.logger.log_interval)
        losses = self._losses() if due else {}  # waits for the device, so it counts as step time
        self._seconds += time.perf_counter() - self._started
        if due:
            self._log(context, losses)

    def on_train_end(self, context: Run) -> None:
        """Log the steps after the last interval, unless the run will resume; print why it ends early."""
        has_steps = self._steps > 0 and context.last_step is not None
        if has_steps and not context.requeue:
            self._log(context, self._losses())
        if context.stop_reason is not None:
            print_rank_0(f"stopped after step {context.progress.step}: {context.stop_reason}")

    def on_eval_start(self, context: Run) -> None:
        self._timers.pause()

    def on_eval_end(self, context: Run) -> None:
        self._timers.resume()
        self._write_losses(context, "validation")

    on_test_start = on_eval_start

    def on_test_end(self, context: Run) -> None:
        self._write_losses(context, "test")

    def close(self, context: Run) -> None:
        for output in self._outputs:
            output.close()

    def _log(self, run: Run, losses: Metrics) -> None:
        self._write(run, "train", losses | self._step_numbers(run) | self._measured(run))
        self._totals = {}
        self._steps = 0
        self._samples = 0
        self._seconds = 0.0

    def _losses(self) -> Metrics:
        return {name: (total / self._steps).item() for name, total in self._totals.items()}

    def _step_numbers(self, run: Run) -> Metrics:
        config = self._config
        step = run.last_step
        speed = self._speed
        assert step is not None, "a step ended"
        assert speed is not None, "training has started"
        tokens = self._samples * config.dataset.seq_length / self._seconds
        numbers: Metrics = {
            "learning rate": step.learning_rate,
            "step time": self._seconds / self._steps,
            "tokens per second": tokens,
            **speed(tokens),
            "batch size": step.samples,
            "consumed samples": run.progress.consumed_train_samples,
            "consumed tokens": run.progress.consumed_train_samples * config.dataset.seq_length,
            "skipped steps": run.progress.skipped_steps,
            **metrics.loss_scale(run),
        }
        optional = {"grad norm": step.grad_norm, "zeros in grad": step.zeros_in_grad}
        return numbers | {
            name: float(value) for name, value in optional.items() if value is not None
        }

    def _measured(self, run: Run) -> Metrics:
        """The metrics that need communication between ranks."""
        assert self._energy is not None, "training has started"
        logs_norm = self._config.logger.log_params_norm
        norm: Metrics = {"params norm": metrics.params_norm(run.optimizer)} if logs_norm else {}
        times = self._wait.read(self._steps) | self._timers.read(self._steps)
        return norm | metrics.memory_metrics() | self._energy(self._steps) | times

    def _write_losses(self, run: Run, kind: str) -> None:
        losses = {name: loss.item() for name, loss in (run.total_loss_dict or {}).items()}
        self._write(run, kind, losses)

    def _write(self, run: Run, kind: str, numbers: Metrics) -> None:
        for output in self._outputs:
            output.write(run.progress.step, kind, numbers)


def _ramp(train: TrainingConfig) -> str:
    if train.rampup_batch_size is None:
        return ""
    start, _, samples = train.rampup_batch_size
    return f" (ramped up from {start} samples over {samples:,} samples)"


def announcement(config: ConfigContainer, step: int) -> str:
    """One line about the training that is about to start."""
    train = config.train
    length = config.dataset.seq_length
    if train.skip_train:
        return f"train.skip_train: the weights of step {step} are evaluated, and nothing is trained"
    if step >= train.train_iters:
        return f"nothing is left to train: the run is at step {step}, train.train_iters={train.train_iters}"
    sizes = sizes_of(config.model) | {"data": config.data_parallel_size()}
    parts = [(name, sizes[name]) for name in ("tensor", "pipeline", "context", "data")]
    layout = ", ".join(f"{name} parallel {size}" for name, size in parts if size > 1)
    count = distributed.world_size()
    processes = f"{count} process{'es' if count > 1 else ''}"
    return (
        f"training from step {step} to {train.train_iters}: {train.global_batch_size} x {length} = "
        f"{train.global_batch_size * length:,} tokens per step{_ramp(train)} on {processes}"
        + (f" ({layout})" if layout else "")
    )
