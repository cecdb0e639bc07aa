# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingTypeStubs=false
"""A step that went wrong is repeated before the optimizer sees it, by Megatron-Core's rerun state machine.

Losses and gradients of each step are looked at on every rank. If one is not finite, or a loss is a spike, the
step is repeated from the same state and batches. A result that is then right was a transient error, of the
hardware most likely, and the run goes on with it. One that is wrong again is persistent: it lies in the batch or
in the weights.
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

from megatron.bridge.backends.fully_sharded import local, names_of
from megatron.bridge.checkpoint.collective import on_first_rank
from megatron.bridge.training.callbacks.base import Callback
from megatron.bridge.training.callbacks.preemption import REQUEUE
from megatron.bridge.training.config import ConfigContainer, RerunStateMachineConfig
from megatron.bridge.training.loop import forward_backward, zero_gradients
from megatron.bridge.training.losses import Report, sum_and_count
from megatron.bridge.training.random_states import random_states, set_random_states
from megatron.bridge.training.state import Run
from megatron.bridge.utils import dist
from megatron.bridge.utils.atomic import write_text
from megatron.bridge.utils.console import console

SKIPPED = "skipped_batches.json"
KNOWN_LOSSES = ("large_value_counts", "max_values")  # how many the machine has seen, and the largest


class Batches(core.RerunDataIterator):
    """Microbatches that can be drawn a second time."""

    def __iter__(self) -> Iterator[Any]:
        return self


class Rerun(Callback):
    """Repeats steps whose loss or gradient is wrong, as ``rerun_state_machine`` of the config says."""

    def __init__(self, config: RerunStateMachineConfig, fp16: bool) -> None:
        self._config = config
        # With fp16 the loss scale finds its way by gradients that are not finite.
        self._looks_at_gradients = config.check_for_nan_in_grad and not fp16
        self._machine: Any = None
        self._known_losses: dict[str, Any] = {}
        self._batches: list[Batches] = []
        self._wrong: str | None = None

    def state_dict(self) -> dict[str, Any]:
        """What a spike is compared with."""
        return {name: getattr(self._machine, name) for name in KNOWN_LOSSES} if self._machine else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Kept until there is a machine."""
        self._known_losses = state

    def on_train_start(self, context: Run) -> None:
        """Put Megatron-Core's machine in charge of batches and random states."""
        core.destroy_rerun_state_machine()
        cast(Any, core).initialize_rerun_state_machine(
            state_save_func=partial(_states, context),
            state_restore_func=partial(_set_states, context),
            mode=core.RerunMode.VALIDATE_RESULTS,
        )
        self._machine = core.get_rerun_state_machine()
        for name, known in self._known_losses.items():
            setattr(self._machine, name, known)
        self._machine.should_checkpoint_and_exit()  # before that was called once, it looks at nothing
        self._batches = [Batches(batches) for batches in context.train_batches]
        context.train_batches = list(self._batches)

    def on_train_step_start(self, context: Run) -> None:
        """Note where the step begins."""
        self._machine.should_run_forward_backward(self._batches)

    def on_grads_ready(self, context: Run) -> None:
        """Look at the step; repeat it if any rank found something."""
        self._look(context)
        first = self._wrong
        while self._machine.should_run_forward_backward(self._batches):
            zero_gradients(context)
            context.reports = forward_backward(context, context.train_batches)
            self._look(context)
            self._judge(context, first)

    def close(self, context: Run) -> None:
        """Leave no machine behind."""
        core.destroy_rerun_state_machine()

    def _look(self, run: Run) -> None:
        self._wrong = None
        for name, value, rejected in self._results(run):
            if rejected and self._wrong is None:
                self._wrong = f"{name} is {value.item():g} on rank {dist.rank()} ({socket.gethostname()})"
            # Not fatal: the machine would end the job, to repeat the step on another host.
            self._machine.validate_result(value, partial(_known, rejected), name, fatal=False)

    def _results(self, run: Run) -> Iterator[tuple[str, torch.Tensor, bool]]:
        """What is looked at: name, value, and whether it is wrong."""
        config = self._config
        if run.reports:
            loss = mean_loss(run.reports)
            if config.check_for_nan_in_loss:
                yield "the loss", loss, _is_not_finite(loss)
            if config.check_for_spiky_loss:
                largest = self._machine.is_unexpectedly_large
                spike = largest(loss, config.spiky_loss_factor, "loss", config.spiky_loss_samples)
                yield "the spiking loss", loss, spike
        if self._looks_at_gradients:
            norm = _gradient_norm(run)
            yield "the gradient's norm", norm, _is_not_finite(norm)

    def _judge(self, run: Run, first: str | None) -> None:
        """Say what a repeated step has shown; end the run if it was wrong again."""
        before, after = (
            [found for found in dist.all_gather_object(mine) if found is not None] for mine in (first, self._wrong)
        )
        step = run.progress.step + 1
        if not after:
            console().print(
                f"step {step}: {'; '.join(before)}; repeated, it is right: a transient error", markup=False
            )
            return
        what = f"step {step}: {'; '.join(after)}; repeated, it is the same: a persistent error"
        if self._config.when_persistent == "skip" and run.config.checkpoint.save is not None:
            root = Path(run.config.checkpoint.save)
            on_first_rank(lambda: _note(root, step, what))
            console().print(f"{what}; exit code {REQUEUE}: started again, the run skips this batch", markup=False)
            raise SystemExit(REQUEUE)
        raise FloatingPointError(
            f"{what}; nothing of it is saved. Look for broken samples, or set train.iterations_to_skip=[{step}] "
            "or rerun_state_machine.when_persistent=skip"
        )


def mean_loss(reports: list[Report]) -> torch.Tensor:
    """The mean losses of this rank's microbatches, added up; their sums would grow with the batch.

    Args:
        reports: What the loss function reported, as ``LossTotals`` takes it.
    """
    sums: Report = {}
    for report in reports:
        for name, value in report.items():
            sums[name] = sums.get(name, 0.0) + sum_and_count(value)
    return torch.stack([total[0] / total[1].clamp(min=1) for total in sums.values()]).sum()


class SkipBatches(Callback):
    """Draws batches that shall not be learned from, and counts their steps as skipped."""

    def __init__(self, config: ConfigContainer) -> None:
        self._steps = set(config.train.iterations_to_skip)
        self._save = config.checkpoint.save

    def on_train_start(self, context: Run) -> None:
        """Add the steps that earlier starts of this run found to be broken."""
        if self._save is not None:
            root = Path(self._save)
            self._steps |= set(on_first_rank(lambda: noted(root)))
        self._skip(context)

    def on_train_step_end(self, context: Run) -> None:
        """Skip what comes next; a run that stops here begins with that when it goes on."""
        context.left_out = 0
        if context.stop_reason is None:
            self._skip(context)

    def _skip(self, run: Run) -> None:
        progress, train = run.progress, run.config.train
        while progress.step + 1 in self._steps and progress.step < train.train_iters:
            for batches in run.train_batches:
                for _ in range(run.num_microbatches):
                    next(batches)
            progress.step += 1
            progress.consumed_train_samples += run.batch_size
            progress.skipped_steps += 1
            run.left_out += 1
            console().print(f"step {progress.step}: batch skipped", markup=False)


def noted(root: Path) -> dict[int, str]:
    """The steps to skip in a run's folder, with what was wrong."""
    try:
        return {int(step): what for step, what in json.loads((root / SKIPPED).read_text()).items()}
    except FileNotFoundError:
        return {}


def _note(root: Path, step: int, what: str) -> None:
    write_text(root / SKIPPED, json.dumps({**noted(root), step: what}, indent=1) + "\n")


def _states(run: Run) -> dict[str, Any]:
    """What a forward and a backward pass change, beside the gradients."""
    return {"random": random_states(), "biases": [bias.clone() for bias in _router_biases(run)]}


def _set_states(run: Run, states: dict[str, Any]) -> None:
    set_random_states(states["random"])
    for bias, before in zip(_router_biases(run), states["biases"], strict=True):
        bias.copy_(before)


def _router_biases(run: Run) -> list[torch.Tensor]:
    """Of routers that balance their experts by a bias: Megatron-Core moves it where it reduces gradients."""
    buffers = (named for chunk in run.model for named in chunk.named_buffers())
    return [buffer for name, buffer in buffers if name.endswith("router.expert_bias")]


def _known(rejected: bool, value: torch.Tensor) -> bool:
    return rejected


def _is_not_finite(value: torch.Tensor) -> bool:
    return not math.isfinite(value.item())


def _gradient_norm(run: Run) -> torch.Tensor:
    """Of what this rank holds: not the norm of the whole gradient, but not finite if that is not."""
    norms: list[torch.Tensor] = [
        cast(Any, gradient).float().norm() for chunk in run.model for gradient in _gradients(chunk)
    ]
    return torch.stack([torch.zeros((), device=torch.cuda.current_device()), *norms]).square().sum().sqrt()


def _gradients(chunk: Any) -> Iterator[torch.Tensor]:
    if names_of(chunk):
        yield from (local(parameter.grad) for parameter in chunk.parameters() if parameter.grad is not None)
    else:
        yield from (buffer.grad_data for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers))
