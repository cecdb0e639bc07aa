# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingTypeStubs=false
"""Repeat a step with an invalid result before the optimizer step, with Megatron-Core's rerun state machine.

Each rank checks the losses and gradients of every step. If one of them is not finite, or a loss spikes, the step
is repeated from the same state with the same batches. If the repeated result is valid, the error was transient,
most likely in the hardware, and the run continues. If it is invalid again, the error is persistent: its cause is
the batch or the weights.
"""

import json
import math
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from megatron.core import rerun_state_machine as core

from megatron.bridge.backends.fsdp.sharded_rows import local_rows, sharded_names
from megatron.bridge.checkpoint.collective import on_first_rank
from megatron.bridge.training.callbacks.base import Callback
from megatron.bridge.training.callbacks.guard.preemption import REQUEUE_EXIT_CODE
from megatron.bridge.training.callbacks.guard.skipped_batches import SKIPPED_FILE, steps_to_skip
from megatron.bridge.training.config import RerunStateMachineConfig
from megatron.bridge.training.initialize.rank_state import random_states, set_random_states
from megatron.bridge.training.loop import forward_backward, zero_gradients
from megatron.bridge.training.state import Run
from megatron.bridge.training.step.losses import LossReport, sum_and_count
from megatron.bridge.utils import distributed
from megatron.bridge.utils.atomic import write_text
from megatron.bridge.utils.console import print_rank_0

LOSS_HISTORY = ("large_value_counts", "max_values")  # attributes of the state machine


class ReplayableBatches(core.RerunDataIterator):
    """Microbatches that can be read a second time."""

    def __iter__(self) -> Iterator[Any]:
        return self


class Rerun(Callback):
    """Repeats steps whose loss or gradient is invalid, as configured in ``rerun_state_machine``."""

    def __init__(self, config: RerunStateMachineConfig, fp16: bool) -> None:
        self._config = config
        # with fp16, overflowing gradients are normal: they adjust the loss scale
        self._checks_gradients = config.check_for_nan_in_grad and not fp16
        self._machine: Any = None
        self._loss_history: dict[str, Any] = {}
        self._batches: list[ReplayableBatches] = []
        self._problem: str | None = None

    def state_dict(self) -> dict[str, Any]:
        """The loss history that spikes are compared with."""
        return (
            {name: getattr(self._machine, name) for name in LOSS_HISTORY} if self._machine else {}
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loss_history = state  # applied in on_train_start, when the state machine exists

    def on_train_start(self, context: Run) -> None:
        core.destroy_rerun_state_machine()
        cast(Any, core).initialize_rerun_state_machine(
            state_save_func=partial(_save_states, context),
            state_restore_func=partial(_restore_states, context),
            mode=core.RerunMode.VALIDATE_RESULTS,
        )
        self._machine = core.get_rerun_state_machine()
        for name, known in self._loss_history.items():
            setattr(self._machine, name, known)
        self._machine.should_checkpoint_and_exit()  # the state machine checks nothing before its first call
        self._batches = [ReplayableBatches(batches) for batches in context.train_batches]
        context.train_batches = list(self._batches)

    def on_train_step_start(self, context: Run) -> None:
        self._machine.should_run_forward_backward(self._batches)

    def on_grads_ready(self, context: Run) -> None:
        """Check the results of the step, and repeat it if any rank found a problem."""
        self._validate(context)
        first = self._problem
        while self._machine.should_run_forward_backward(self._batches):
            zero_gradients(context)
            context.reports = forward_backward(context, context.train_batches)
            self._validate(context)
            self._classify(context, first)

    def close(self, context: Run) -> None:
        core.destroy_rerun_state_machine()

    def _validate(self, run: Run) -> None:
        self._problem = None
        for name, value, rejected in self._results(run):
            if rejected and self._problem is None:
                self._problem = f"{name} is {value.item():g} on rank {distributed.rank()} ({socket.gethostname()})"
            # with fatal=True the state machine would end the job, to repeat the step on another host
            self._machine.validate_result(value, partial(_is_rejected, rejected), name, fatal=False)

    def _results(self, run: Run) -> Iterator[tuple[str, torch.Tensor, bool]]:
        """Name and value of each checked result, and whether it is invalid."""
        config = self._config
        if run.reports:
            loss = mean_loss(run.reports)
            if config.check_for_nan_in_loss:
                yield "the loss", loss, _is_not_finite(loss)
            if config.check_for_spiky_loss:
                largest = self._machine.is_unexpectedly_large
                spike = largest(loss, config.spiky_loss_factor, "loss", config.spiky_loss_samples)
                yield "the spiking loss", loss, spike
        if self._checks_gradients:
            norm = _gradient_norm(run)
            yield "the gradient norm", norm, _is_not_finite(norm)

    def _classify(self, run: Run, first: str | None) -> None:
        """Print whether the error was transient; end the run if it is persistent."""
        before, after = (
            [
                problem
                for problem in distributed.all_gather_object(own_problem)
                if problem is not None
            ]
            for own_problem in (first, self._problem)
        )
        step = run.progress.step + 1
        if not after:
            print_rank_0(
                f"step {step}: {'; '.join(before)}; the repeated step is valid: a transient error"
            )
            return
        sentence = f"step {step}: {'; '.join(after)}; the repeated step is invalid, too: a persistent error"
        if self._config.when_persistent == "skip" and run.config.checkpoint.save is not None:
            root = Path(run.config.checkpoint.save)
            on_first_rank(
                lambda: write_text(
                    root / SKIPPED_FILE,
                    json.dumps({**steps_to_skip(root), step: sentence}, indent=1) + "\n",
                )
            )
            print_rank_0(
                f"{sentence}; exit code {REQUEUE_EXIT_CODE}: a restarted run skips this batch"
            )
            raise SystemExit(REQUEUE_EXIT_CODE)
        raise FloatingPointError(
            f"{sentence}; the step is not saved. Look for corrupt samples, or set train.iterations_to_skip=[{step}] "
            "or rerun_state_machine.when_persistent=skip"
        )


def mean_loss(reports: list[LossReport]) -> torch.Tensor:
    """The mean loss of this rank's microbatches, summed over loss names; independent of the batch size."""
    sums: LossReport = {}
    for report in reports:
        for name, value in report.items():
            sums[name] = sums.get(name, 0.0) + sum_and_count(value)
    return torch.stack([total[0] / total[1].clamp(min=1) for total in sums.values()]).sum()


def _save_states(run: Run) -> dict[str, Any]:
    """The state that forward and backward passes change, apart from the gradients."""
    return {"random": random_states(), "biases": [bias.clone() for bias in _router_biases(run)]}


def _restore_states(run: Run, states: dict[str, Any]) -> None:
    set_random_states(states["random"])
    for bias, before in zip(_router_biases(run), states["biases"], strict=True):
        bias.copy_(before)


def _router_biases(run: Run) -> list[torch.Tensor]:
    """The biases with which routers balance experts: Megatron-Core updates them when it reduces gradients."""
    buffers = (named for chunk in run.model for named in chunk.named_buffers())
    return [buffer for name, buffer in buffers if name.endswith("router.expert_bias")]


def _is_rejected(rejected: bool, value: torch.Tensor) -> bool:
    return rejected


def _is_not_finite(value: torch.Tensor) -> bool:
    return not math.isfinite(value.item())


def _gradient_norm(run: Run) -> torch.Tensor:
    """The norm of this rank's gradients: not finite if the norm of the full gradient is not."""
    norms: list[torch.Tensor] = [
        # the type of the sum: a copy in fp32 would take twice the memory of 16-bit gradients
        cast(Any, torch.linalg).vector_norm(gradient, dtype=torch.float32)
        for chunk in run.model
        for gradient in _gradients(chunk)
    ]
    return (
        torch.stack([torch.zeros((), device=torch.cuda.current_device()), *norms])
        .square()
        .sum()
        .sqrt()
    )


def _gradients(chunk: Any) -> Iterator[torch.Tensor]:
    if sharded_names(chunk):
        yield from (
            local_rows(parameter.grad)
            for parameter in chunk.parameters()
            if parameter.grad is not None
        )
    else:
        yield from (buffer.grad_data for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers))
