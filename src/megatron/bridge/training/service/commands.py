# SPDX-License-Identifier: Apache-2.0
"""What the HTTP process asks the ranks, and what they answer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron.bridge.inference.requests import Sampling
from megatron.bridge.training.adapter_trainer import AdamSettings
from megatron.bridge.training.step.row_losses import TrainingRow


@dataclass(frozen=True)
class AddModel:
    """Add an adapter, which answers nothing."""

    id: int
    model: str
    rank: int
    alpha: float
    seed: int
    target_modules: Sequence[str]


@dataclass(frozen=True)
class RemoveModel:
    """Remove an adapter, if it is there."""

    id: int
    model: str


@dataclass(frozen=True)
class Compute:
    """Compute rows of one adapter; the answer is a ``RowResult`` for each."""

    id: int
    model: str
    rows: Sequence[TrainingRow]
    forward_only: bool


@dataclass(frozen=True)
class Step:
    """Run the optimizer; the answer is the norm of the gradient."""

    id: int
    model: str
    settings: AdamSettings


@dataclass(frozen=True)
class SaveModel:
    """Save an adapter with its optimizer."""

    id: int
    model: str
    directory: str


@dataclass(frozen=True)
class LoadModel:
    """Load what ``SaveModel`` wrote, also as a new adapter; the answer is its rank."""

    id: int
    model: str
    directory: str
    with_optimizer: bool


@dataclass(frozen=True)
class ExportModel:
    """Write an adapter in the format of ``peft``."""

    id: int
    model: str
    directory: str


@dataclass(frozen=True)
class Sample:
    """Continue a prompt; the answer is a list of ``Completion``."""

    id: int
    prompt: Sequence[int]
    sampling: Sampling
    directory: (
        str | None
    )  # adapter to sample from, whose name is that of the sampling; None is the base


@dataclass(frozen=True)
class CancelSample:
    """End a sample, which is then answered with the tokens so far."""

    id: int
    sample: int


ModelCommand = AddModel | RemoveModel | Compute | Step | SaveModel | LoadModel | ExportModel
Command = ModelCommand | Sample | CancelSample


@dataclass(frozen=True)
class Done:
    """A command's answer."""

    id: int
    value: Any = None


@dataclass(frozen=True)
class Refused:
    """A command that changed nothing, and why."""

    id: int
    message: str


Event = Done | Refused
