# SPDX-License-Identifier: Apache-2.0
"""What a run shows: numbers are gathered once and go to all outputs alike."""

import time
from typing import Any

import torch

from megatron.bridge.checkpoint.collective import on_first_rank
from megatron.bridge.training.callbacks.base import Callback
from megatron.bridge.training.callbacks.measures import Energy, Numbers, Speed, loss_scale, memory, params_norm
from megatron.bridge.training.callbacks.outputs import Output, outputs
from megatron.bridge.training.callbacks.timing import DataWait, StepTimers
from megatron.bridge.training.config import ConfigContainer, TrainingConfig
from megatron.bridge.training.losses import Report
from megatron.bridge.training.state import Run
from megatron.bridge.utils import dist
from megatron.bridge.utils.console import console


class Logging(Callback):
    """Shows mean losses, learning rate, norms, speed and memory every ``logger.log_interval`` steps.

    Losses are added up where they are computed and read once per interval, so a step that is not shown waits for
    nothing. All ranks take the numbers; the first one writes them, to all outputs alike.
    """

    def __init__(self, config: ConfigContainer) -> None:
        self._config = config
        self._outputs: list[Output] = []
        self._totals: Report = {}
        self._steps = self._samples = 0
        self._seconds = 0.0
        self._started = 0.0
        self._speed: Speed | None = None
        self._energy: Energy | None = None
        self._timers = StepTimers(config.logger)
        self._wait = DataWait()

    def state_dict(self) -> dict[str, Any]:
        """What was added up since the last line: a run that goes on shows what the undisturbed one does."""
        if not self._steps:
            return {}
        totals = {name: total.item() for name, total in self._totals.items()}
        return {"totals": totals, "counts": (self._steps, self._samples, self._seconds)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on adding up."""
        self._totals = {name: torch.tensor(total, dtype=torch.float64) for name, total in state["totals"].items()}
        self._steps, self._samples, self._seconds = state["counts"]

    def on_train_start(self, context: Run) -> None:
        """Open the outputs, on the first rank; if that fails, all ranks stop."""
        self._speed = Speed(self._config, context)
        self._energy = Energy(self._config.logger.log_energy)
        self._timers.attach(context)
        on_first_rank(lambda: self._open(context.progress.step))
        console().print(announcement(self._config, context.progress.step), markup=False)

    def _open(self, step: int) -> None:
        self._outputs = outputs(self._config)
        for output in self._outputs:
            output.open(step, self._config.train.train_iters)

    def on_train_step_start(self, context: Run) -> None:
        """Only steps are timed, not what happens between them."""
        self._wait.attach(context)
        self._started = time.perf_counter()

    def on_grads_ready(self, context: Run) -> None:
        """From here on the optimizer works."""
        self._timers.start_optimizer()

    def on_train_step_end(self, context: Run) -> None:
        """Add the step up; show at the interval and at the end."""
        step = context.last_step
        assert step is not None, "a step ended"
        self._timers.stop_optimizer()
        for name, loss in step.loss_dict.items():
            self._totals[name] = self._totals[name].to(loss.device) + loss if name in self._totals else loss
        self._steps += 1
        self._samples += step.samples
        last = context.progress.step == self._config.train.train_iters
        due = last or context.is_due(self._config.logger.log_interval)
        numbers = self._losses() if due else {}  # waits for the device, so it belongs to the time of the steps
        self._seconds += time.perf_counter() - self._started
        if due:
            self._show(context, numbers)

    def on_train_end(self, context: Run) -> None:
        """Show the steps behind the last interval, if the run is over; tell why it ends early."""
        if self._steps and not context.requeue:
            self._show(context, self._losses())
        if context.stop_reason is not None:
            console().print(f"stopped after step {context.progress.step}: {context.stop_reason}", markup=False)

    def on_eval_start(self, context: Run) -> None:
        """It is no part of a step."""
        self._timers.pause()

    def on_eval_end(self, context: Run) -> None:
        """Show the losses on the validation data."""
        self._timers.resume()
        self._write_losses(context, "validation")

    def on_test_start(self, context: Run) -> None:
        """It is no part of a step."""
        self._timers.pause()

    def on_test_end(self, context: Run) -> None:
        """Show the losses on the test data."""
        self._write_losses(context, "test")

    def close(self, context: Run) -> None:
        """Close the outputs."""
        for output in self._outputs:
            output.close()

    def _show(self, run: Run, losses: Numbers) -> None:
        self._write(run, "train", losses | self._step_numbers(run) | self._measured(run))
        self._totals, self._steps, self._samples, self._seconds = {}, 0, 0, 0.0

    def _losses(self) -> Numbers:
        return {name: (total / self._steps).item() for name, total in self._totals.items()}

    def _step_numbers(self, run: Run) -> Numbers:
        config, step, speed = self._config, run.last_step, self._speed
        assert step is not None, "a step ended"
        assert speed is not None, "training has started"
        tokens = self._samples * config.dataset.seq_length / self._seconds
        numbers: Numbers = {
            "learning rate": step.learning_rate,
            "step time": self._seconds / self._steps,
            "tokens per second": tokens,
            **speed(tokens),
            "batch size": step.samples,
            "consumed samples": run.progress.consumed_train_samples,
            "consumed tokens": run.progress.consumed_train_samples * config.dataset.seq_length,
            "skipped steps": run.progress.skipped_steps,
            **loss_scale(run),
        }
        optional = {"grad norm": step.grad_norm, "zeros in grad": step.zeros_in_grad}
        return numbers | {name: float(value) for name, value in optional.items() if value is not None}

    def _measured(self, run: Run) -> Numbers:
        """What all ranks find out together."""
        assert self._energy is not None, "training has started"
        norm: Numbers = {"params norm": params_norm(run.optimizer)} if self._config.logger.log_params_norm else {}
        times = self._wait.read(self._steps) | self._timers.read(self._steps)
        return norm | memory() | self._energy(self._steps) | times

    def _write_losses(self, run: Run, kind: str) -> None:
        losses = {name: loss.item() for name, loss in (run.total_loss_dict or {}).items()}
        self._write(run, kind, losses)

    def _write(self, run: Run, kind: str, numbers: Numbers) -> None:
        for output in self._outputs:
            output.write(run.progress.step, kind, numbers)


def _ramp(train: TrainingConfig) -> str:
    if train.rampup_batch_size is None:
        return ""
    start, _, samples = train.rampup_batch_size
    return f" (from {start} samples on, full after {samples:,} samples)"


def announcement(config: ConfigContainer, step: int) -> str:
    """What is about to happen, in one line."""
    model, train, length = config.model, config.train, config.dataset.seq_length
    if step >= train.train_iters:
        return f"nothing is left to train: the run is at step {step}, train.train_iters={train.train_iters}"
    sizes = {
        "tensor": model.tensor_model_parallel_size,
        "pipeline": model.pipeline_model_parallel_size,
        "context": model.context_parallel_size,
        "data": config.data_parallel_size(),
    }
    layout = ", ".join(f"{name} parallel {size}" for name, size in sizes.items() if size > 1)
    count = dist.world_size()
    processes = f"{count} process{'es' if count > 1 else ''}"
    return (
        f"training from step {step} to {train.train_iters}: {train.global_batch_size} x {length} = "
        f"{train.global_batch_size * length:,} tokens a step{_ramp(train)} on {processes}"
        + (f" ({layout})" if layout else "")
    )
