# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingTypeStubs=false
"""The state of a run: its parts and its progress."""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import StragglerDetector

from megatron.bridge.checkpoint.async_writer import AsyncSaver
from megatron.bridge.checkpoint.nvrx_writer import NvrxAsyncSaver
from megatron.bridge.data.loaders import Iterators
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.config.batch_size import BatchSize
from megatron.bridge.training.step.cuda_graphs import schedule_of
from megatron.bridge.training.step.losses import LossReport, LossTotals
from megatron.bridge.utils.config.origins import Origins

if TYPE_CHECKING:
    from megatron.bridge.training.callbacks.base import CallbackManager

BatchIterator = Iterator[dict[str, Any]]
LossFunction = Callable[..., tuple[Any, ...]]
# The signature that Megatron-Core's schedules call: (data_iterator, model[, return_schedule_plan]).
ForwardStep = Callable[..., tuple[torch.Tensor, LossFunction]]


@dataclass
class Progress:
    """The progress of a run; saved with every checkpoint."""

    step: int = 0
    """Completed optimizer steps, including skipped ones."""
    consumed_train_samples: int = 0
    """Training samples used so far; the next batch starts here."""
    skipped_steps: int = 0
    """Steps whose update was skipped because the gradients were not finite."""

    def state_dict(self) -> dict[str, int]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore ``state``; a counter that an older version did not save keeps its value."""
        for entry in fields(self):
            setattr(self, entry.name, state.get(entry.name, getattr(self, entry.name)))


@dataclass
class TrainState(Progress):
    """The progress of a program with its own loop, which counts itself."""

    floating_point_operations_so_far: float = 0.0


class GlobalState:
    """The state of a program with its own loop, which sets ``cfg``; ``training.checkpointing`` saves it."""

    def __init__(self) -> None:
        self.cfg: Any = None
        self.train_state = TrainState()
        self.start_time = time.time()
        self.straggler_timer = StragglerDetector()  # does nothing unless the program configures it
        self.async_saver: AsyncSaver | None = None

    def initialize_async_checkpoint_worker(self) -> None:
        """With ``checkpoint.async_save``, start what writes: call this before CUDA is used."""
        checkpoint = self.cfg.checkpoint
        if checkpoint.async_save and self.async_saver is None:
            self.async_saver = (
                NvrxAsyncSaver() if checkpoint.async_strategy == "nvrx" else AsyncSaver()
            )
            self.async_saver.reserve(0)


@dataclass(frozen=True)
class StepResult:
    """The result of one step, equal on all ranks."""

    loss_dict: dict[str, torch.Tensor]
    """Mean losses over the global batch by name, each a scalar tensor."""
    grad_norm: float | None
    """Norm of the full gradient before clipping; None if it was not computed."""
    learning_rate: float
    skipped: bool
    """Whether the update was skipped because the gradients were not finite."""
    samples: int
    """Training samples of the step, over all ranks."""
    zeros_in_grad: float | None = None
    """Number of zeros in the full gradient, with ``optimizer.log_num_zeros_in_grad``."""


@dataclass
class Run:
    """A run, built by ``setup``, updated by the loop and passed to every callback."""

    config: ConfigContainer
    origins: Origins
    model: list[MegatronModule]
    """Model chunks of this rank, one per virtual pipeline stage."""
    optimizer: MegatronOptimizer
    """Megatron-Core's optimizer over the chunks."""
    scheduler: OptimizerParamScheduler
    """Megatron-Core's schedule of learning rate and weight decay."""
    tokenizer: Any
    """The tokenizer built from ``config.tokenizer``."""
    forward_step: ForwardStep
    """The forward step with the signature that Megatron-Core's schedules call."""
    callbacks: "CallbackManager"
    progress: Progress = field(default_factory=Progress)
    data: Iterators = field(default_factory=lambda: Iterators(None, None, None))
    """Microbatches of this rank for training, validation and test; None where there is no such data."""
    train_batches: list[BatchIterator] = field(default_factory=list[BatchIterator])
    """The training batches in use: one iterator per chunk over the same microbatches."""
    loss_totals: LossTotals = field(default_factory=LossTotals)
    router_totals: torch.Tensor | None = None
    """What is in the loss, tokens that are no padding, and positions of the current step, by which router losses are
    scaled."""
    user_state: dict[str, Any] = field(default_factory=dict[str, Any])
    """Values of the user's callbacks. It is not saved; a callback's ``state_dict`` is."""
    skipped_before: int = 0
    """Number of steps skipped right before the current or next step."""
    chat_template: str | None = None
    """Text of the template that conversations are rendered with, if it is not that of the model's tokenizer."""
    best_step: int | None = None
    """The step of the best evaluation, if the run remembers it (``BestModel``)."""
    stop_reason: str | None = None
    """A callback sets it to end the loop after this step."""
    requeue: bool = False
    """Whether the run should be restarted to continue; set together with ``stop_reason``."""
    exit_code: int | None = None
    """Exit code of a run with ``requeue``; None is the one that asks the scheduler for a restart."""
    reports: list[LossReport] = field(default_factory=list[LossReport])
    """Reports of the loss function for each microbatch of the current step; a rerun of the step replaces them."""
    last_step: StepResult | None = None
    total_loss_dict: dict[str, torch.Tensor] | None = None
    """Mean losses of the last evaluation."""
    companions: "list[Run]" = field(default_factory=list["Run"])
    """Runs of other models, such as a critic, that are saved with this one, in folders of their own."""
    evaluation: "Callable[[Run], LossReport] | None" = None
    """Evaluates on the validation data, where that is not the loss of batches; a callback sets it."""

    @property
    def batch_size(self) -> int:
        """Samples of the current or next step, over all ranks."""
        return self._batch_size.at(self.progress.consumed_train_samples)

    @property
    def num_microbatches(self) -> int:
        """Microbatches of this rank in the current or next step."""
        return self.microbatches_of(self.batch_size)

    def microbatches_of(self, samples: int) -> int:
        """Microbatches of this rank in a batch of ``samples`` over all ranks."""
        return samples // (self.config.train.micro_batch_size * self.config.data_parallel_size())

    def is_due(self, interval: int | None) -> bool:
        """Whether the last step, or a step skipped right before it, is a multiple of ``interval``."""
        if interval is None or interval < 1:
            return False
        step = self.progress.step
        return step // interval > (step - 1 - self.skipped_before) // interval

    @cached_property
    def schedule(self) -> Callable[..., Any]:
        """Megatron-Core's schedule: one of three functions that take the same keywords, or its CUDA graph."""
        return schedule_of(self.config.model)

    @cached_property
    def _batch_size(self) -> BatchSize:
        return BatchSize(self.config.train)

    @property
    def state(self) -> "Run":
        """The run itself, for callbacks that use ``context.state``."""
        return self

    @property
    def loss_dict(self) -> dict[str, torch.Tensor] | None:
        return self.last_step.loss_dict if self.last_step else None

    @property
    def grad_norm(self) -> float | None:
        return self.last_step.grad_norm if self.last_step else None

    @property
    def skipped_iter(self) -> bool:
        """Whether the update of the last step was skipped because its gradients were not finite."""
        return bool(self.last_step and self.last_step.skipped)

    def emit(self, event: str, *values: Any) -> None:
        """Call ``on_<event>(run, *values)`` of every callback, in order."""
        self.callbacks.emit(event, self, *values)


CallbackContext = Run
"""The public name of the argument of callback hooks."""
