# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingTypeStubs=false
"""What a run shows: numbers are gathered once and go to all outputs alike."""

import time

from megatron.core.models.common.language_module.language_module import LanguageModule

from megatron.bridge.checkpoint.collective import on_first_rank
from megatron.bridge.checkpoint.model_io import unwrap
from megatron.bridge.models.flops import flops_per_token
from megatron.bridge.training.callbacks.base import Callback
from megatron.bridge.training.callbacks.outputs import Numbers, Output, outputs
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.losses import Report
from megatron.bridge.training.resolve_data import tuning_parts
from megatron.bridge.training.state import Run
from megatron.bridge.utils import dist
from megatron.bridge.utils.console import console


class Logging(Callback):
    """Shows mean losses, learning rate, gradient norm and speed every ``logger.log_interval`` steps.

    Losses are added up where they are computed and read once per interval, so a step that is not shown waits for
    nothing.
    """

    def __init__(self, config: ConfigContainer) -> None:
        self._config = config
        self._outputs: list[Output] = []
        self._totals: Report = {}
        self._steps = self._samples = 0
        self._seconds = 0.0
        self._started = 0.0
        self._flops: float | None = None

    def on_train_start(self, context: Run) -> None:
        """Open the outputs, on the first rank; if that fails, all ranks stop."""
        self._flops = _flops_per_token(self._config, context)
        on_first_rank(lambda: self._open(context.progress.step))
        console().print(announcement(self._config, context.progress.step), markup=False)

    def _open(self, step: int) -> None:
        self._outputs = outputs(self._config)
        for output in self._outputs:
            output.open(step, self._config.train.train_iters)

    def on_train_step_start(self, context: Run) -> None:
        """Only steps are timed, not what happens between them."""
        self._started = time.perf_counter()

    def on_train_step_end(self, context: Run) -> None:
        """Add the step up; show at the interval and at the end."""
        step = context.last_step
        assert step is not None, "a step ended"
        for name, loss in step.loss_dict.items():
            self._totals[name] = self._totals[name] + loss if name in self._totals else loss
        self._steps += 1
        self._samples += step.samples
        last = context.progress.step == self._config.train.train_iters
        due = last or context.progress.step % self._config.logger.log_interval == 0
        numbers = self._losses() if due else {}  # waits for the device, so it belongs to the time of the steps
        self._seconds += time.perf_counter() - self._started
        if due:
            self._write(context, "train", numbers | self._step_numbers(context))
            self._totals, self._steps, self._samples, self._seconds = {}, 0, 0, 0.0

    def on_train_end(self, context: Run) -> None:
        """Tell why the run ends early."""
        if context.stop_reason is not None:
            console().print(f"stopped after step {context.progress.step}: {context.stop_reason}", markup=False)

    def on_eval_end(self, context: Run) -> None:
        """Show the losses on the validation data."""
        self._write_losses(context, "validation")

    def on_test_end(self, context: Run) -> None:
        """Show the losses on the test data."""
        self._write_losses(context, "test")

    def close(self, context: Run) -> None:
        """Close the outputs."""
        for output in self._outputs:
            output.close()

    def _losses(self) -> Numbers:
        return {name: (total / self._steps).item() for name, total in self._totals.items()}

    def _step_numbers(self, run: Run) -> Numbers:
        config, step = self._config, run.last_step
        assert step is not None, "a step ended"
        seconds = self._seconds / self._steps
        numbers: Numbers = {
            "learning rate": step.learning_rate,
            "step time": seconds,
            "tokens per second": self._samples * config.dataset.seq_length / self._seconds,
            "batch size": step.samples,
            "consumed samples": run.progress.consumed_train_samples,
            "skipped steps": run.progress.skipped_steps,
        }
        if self._flops is not None:
            speed = numbers["tokens per second"] / dist.world_size()
            numbers["TFLOP/s per process"] = self._flops * speed / 1e12
        if step.grad_norm is not None:
            numbers["grad norm"] = float(step.grad_norm)
        return numbers

    def _write_losses(self, run: Run, kind: str) -> None:
        losses = {name: loss.item() for name, loss in (run.total_loss_dict or {}).items()}
        self._write(run, kind, losses)

    def _write(self, run: Run, kind: str, numbers: Numbers) -> None:
        for output in self._outputs:
            output.write(run.progress.step, kind, numbers)


def _flops_per_token(config: ConfigContainer, run: Run) -> float | None:
    """Where they can be told: rows of several samples are cheaper than their length says."""
    chunks = [unwrap(chunk) for chunk in run.model]
    if tuning_parts(config.dataset) or not all(isinstance(chunk, LanguageModule) for chunk in chunks):
        return None
    return flops_per_token(chunks, config.dataset.seq_length)


def announcement(config: ConfigContainer, step: int) -> str:
    """What is about to happen, in one line."""
    model, train, length = config.model, config.train, config.dataset.seq_length
    sizes = {
        "tensor": model.tensor_model_parallel_size,
        "pipeline": model.pipeline_model_parallel_size,
        "context": model.context_parallel_size,
        "data": config.data_parallel_size(),
    }
    layout = ", ".join(f"{name} parallel {size}" for name, size in sizes.items() if size > 1)
    count = dist.world_size()
    return (
        f"training from step {step} to {train.train_iters}: {train.global_batch_size} x {length} = "
        f"{train.global_batch_size * length:,} tokens a step on {count} process{'es' if count > 1 else ''}"
        + (f" ({layout})" if layout else "")
    )
