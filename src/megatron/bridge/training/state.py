# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingTypeStubs=false
"""What a run consists of, and how far it has come."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import MegatronModule

from megatron.bridge.data.loaders import Iterators
from megatron.bridge.training.batch_size import BatchSize
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.losses import LossTotals, Report

if TYPE_CHECKING:
    from megatron.bridge.training.callbacks.base import CallbackManager

Batches = Iterator[dict[str, Any]]
LossFunction = Callable[..., tuple[Any, ...]]
# What Megatron-Core's schedules call: (data_iterator, model[, return_schedule_plan]).
ForwardStep = Callable[..., tuple[torch.Tensor, LossFunction]]


@dataclass
class Progress:
    """How far a run has come; saved with every checkpoint.

    Attributes:
        step: Optimizer steps done, skipped ones included.
        consumed_train_samples: Training samples used; the next batch starts here.
        skipped_steps: Steps whose update was skipped because the gradients were not finite.
    """

    step: int = 0
    consumed_train_samples: int = 0
    skipped_steps: int = 0

    def state_dict(self) -> dict[str, int]:
        """Plain numbers."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take over what ``state_dict`` returned; a counter that an older version did not have keeps its value."""
        for entry in fields(self):
            setattr(self, entry.name, state.get(entry.name, getattr(self, entry.name)))


@dataclass(frozen=True)
class StepResult:
    """What one step gave; the same on every rank.

    Attributes:
        loss_dict: Losses over the global batch by name, each a tensor without dimensions.
        grad_norm: Norm of the whole gradient before clipping; None if it was not computed.
        learning_rate: Learning rate of this step.
        skipped: The update was skipped because the gradients were not finite.
        samples: Training samples of the step, over all ranks.
        zeros_in_grad: Numbers of the whole gradient that are 0, with ``optimizer.log_num_zeros_in_grad``.
    """

    loss_dict: dict[str, torch.Tensor]
    grad_norm: float | None
    learning_rate: float
    skipped: bool
    samples: int
    zeros_in_grad: float | None = None


@dataclass
class Run:
    """A run: what ``setup`` made, what the loop changes, and what every callback gets.

    Attributes:
        config: The resolved configuration.
        model: Chunks of this rank, one per virtual pipeline stage.
        optimizer: Megatron-Core's optimizer over the chunks.
        scheduler: Megatron-Core's schedule of learning rate and weight decay.
        tokenizer: What ``config.tokenizer`` built.
        forward_step: The forward step in the form that Megatron-Core's schedules call.
        callbacks: The callbacks in order.
        progress: How far the run has come.
        data: Microbatches of this rank for training, validation and test, each from its first one; None where
            there is no such data.
        train_batches: The training data in use: one iterator per chunk over the same microbatches.
        loss_totals: Adds up the training losses of all ranks.
        user_state: A place for the callbacks of the user; not saved (a callback's ``state_dict`` is).
        left_out: Steps before the one that comes next, or goes on, whose batches were not learnt from.
        stop_reason: Set by a callback to end the loop after this step.
        requeue: Set with ``stop_reason`` if the run shall be started again to go on.
        reports: What the loss function reported for each microbatch of the step that goes on; a callback that
            repeats the step before the optimizer sees it replaces them.
        last_step: The result of the step that just ended.
        total_loss_dict: Mean losses of the evaluation that just ended.
    """

    config: ConfigContainer
    model: list[MegatronModule]
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    tokenizer: Any
    forward_step: ForwardStep
    callbacks: "CallbackManager"
    progress: Progress = field(default_factory=Progress)
    data: Iterators = field(default_factory=lambda: Iterators(None, None, None))
    train_batches: list[Batches] = field(default_factory=list[Batches])
    loss_totals: LossTotals = field(default_factory=LossTotals)
    user_state: dict[str, Any] = field(default_factory=dict[str, Any])
    left_out: int = 0
    stop_reason: str | None = None
    requeue: bool = False
    reports: list[Report] = field(default_factory=list[Report])
    last_step: StepResult | None = None
    total_loss_dict: dict[str, torch.Tensor] | None = None

    @property
    def batch_size(self) -> int:
        """Samples of the step that comes next, or goes on, over all ranks."""
        return self._batch_size.at(self.progress.consumed_train_samples)

    @property
    def num_microbatches(self) -> int:
        """Microbatches of this rank in that step."""
        return self.microbatches_of(self.batch_size)

    def microbatches_of(self, samples: int) -> int:
        """Microbatches of this rank in a batch of ``samples`` over all ranks."""
        return samples // (self.config.train.micro_batch_size * self.config.data_parallel_size())

    def is_due(self, interval: int | None) -> bool:
        """Whether the step that just ended, or one that was left out before it, is a multiple of ``interval``."""
        step = self.progress.step
        return interval is not None and interval > 0 and step // interval > (step - 1 - self.left_out) // interval

    @cached_property
    def _batch_size(self) -> BatchSize:
        return BatchSize(self.config.train)

    @property
    def state(self) -> "Run":
        """The run itself: callbacks written for ``context.state`` find it here."""
        return self

    @property
    def loss_dict(self) -> dict[str, torch.Tensor] | None:
        """Losses of the step that just ended."""
        return self.last_step.loss_dict if self.last_step else None

    @property
    def grad_norm(self) -> float | None:
        """Gradient norm of the step that just ended."""
        return self.last_step.grad_norm if self.last_step else None

    @property
    def skipped_iter(self) -> bool:
        """Whether the step that just ended changed nothing because its gradients were not finite."""
        return bool(self.last_step and self.last_step.skipped)

    def emit(self, event: str, *values: Any) -> None:
        """Call ``on_<event>(run, *values)`` of every callback, in order."""
        self.callbacks.emit(event, self, *values)


# The name that callbacks of users are written against.
CallbackContext = Run
